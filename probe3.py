import sys, time, gc, weakref
sys.path += ["tests/compiled","tests/engine"]
from capture_testing import *
import torch.nn.functional as F
from recompute.errors import *
G=torch.autograd.grad
class MLP(nn.Module):
    def __init__(s, n=SIZE):
        super().__init__(); s.norm=nn.LayerNorm(n); s.up=nn.Linear(n,2*n); s.down=nn.Linear(2*n,n); s.w=nn.Parameter(torch.ones(n))
    def forward(s,x):
        return x + s.down(F.gelu(s.up(s.norm(x)*s.w)))
def tryit(tw, name, step, n=2, want=None):
    try:
        print(name, "code", [tw.runs_code(step) for _ in range(n)])
    except BaseException as e:
        print("FAIL", name, type(e).__name__, str(e)[:400])
def refused(tw,name,step,kind=RuntimeError):
    for m in (tw.plain,tw.under):
        try: step(m); print("NOT REFUSED" , name, "plain" if m is tw.plain else "under")
        except RuntimeError as e: print("  ",name,type(e).__name__,str(e)[:90])
    tw.both(lambda m:m.zero_grad())
def direct(module, step, rules=None, **k):
    tw = Twins(Around(module), rules)
    try: tw.settle(step)
    except AssertionError as e: print("FAIL settle", str(e)[:300])
    return tw
x0=tokens()
def mk(f):
    def step(m):
        x=fresh(x0); torch.manual_seed(0)
        return f(m,x)
    return step
def wrapped(mod): return captured_twins(mod, tokens())
tw=wrapped(MLP()); 
W=lambda m:m.inside.up.weight
def s(m,x): y=m(x); l=loss_of(y); l.backward(retain_graph=True); l.backward(retain_graph=True); l.backward(); return [y,x.grad]
tryit(tw,"retain",mk(s))
def s(m,x):
    y=m(x); l=loss_of(y); l.backward(); l.backward()
refused(tw,"second",mk(s))
def s(m,x): y=m(x); g,=G(loss_of(y),x,create_graph=True); g.pow(2).sum().backward(); return [y,g,x.grad]
tryit(tw,"double",mk(s))
def s(m,x):
    z=x*2; y=m.inside(z); del z; g,=G(loss_of(y),x,create_graph=True); g.pow(2).sum().backward(); return [y,g,x.grad]
tryit(tw,"double deleted input",mk(s))
def s(m,x): y=m(x); return G(loss_of(y),x)
tryit(tw,"grad x",mk(s))
def s(m,x): y=m(x); return G(loss_of(y),W(m))
tryit(tw,"grad w",mk(s))
def s(m,x): y=m(x); return G(loss_of(y),[W(m),x,m.inside.w], retain_graph=True)+G(loss_of(y),x)
tryit(tw,"grad twice",mk(s))
def s(m,x): y=m(x); return G(y,[x,W(m)],grad_outputs=torch.eye(ROWS*SIZE).reshape(-1,ROWS,SIZE)[:5],is_grads_batched=True)
tryit(tw,"batched",mk(s))
def s(m,x): y=m.inside(x); y.sum().backward(); return [y,x.grad]
tryit(tw,"expanded",mk(s))
def s(m,x): y=m.inside(x); y.backward(torch.randn(SIZE,ROWS).t()); return [y,x.grad]
tryit(tw,"transposed",mk(s))
def s(m,x):
    z=x*2; y=m.inside(z); c=z.cos(); u=z.sin(); y.sum().backward(retain_graph=True); (loss_of(c)+loss_of(u)+y.sum()).backward(); return [y,x.grad]
tryit(tw,"expanded, read outside",mk(s))
def s(m,x):
    z=x*2; a=z.exp(); y=m.inside(z); c=z.cos(); u=z.sin(); (loss_of(c)+loss_of(u)*3+loss_of(y)+loss_of(a)).backward(); return [y,x.grad]
tryit(tw,"read outside",mk(s))
def s(m,x):
    y=m.inside(x); y.register_hook(lambda g:g*2); x.register_hook(lambda g:g*3); loss_of(y).backward(); return [y,x.grad]
tryit(tw,"hooks",mk(s))
def s(m,x):
    for _ in range(3): loss_of(m(x)).backward()
    return [x.grad]
tryit(tw,"accumulate",mk(s))
def s(m,x):
    y=m.inside(m.inside(x)); loss_of(y).backward(); return [y,x.grad]
tryit(tw,"twice in a row",mk(s))
import threading
def s(m,x):
    y=m(x); t=threading.Thread(target=lambda: loss_of(y).backward()); t.start(); t.join(); return [y,x.grad]
tryit(tw,"thread bw",mk(s))
def s(m,x):
    m(x); a=m(x); b=m(x*2); c=m(x*3); loss_of(b).backward(); loss_of(c).backward(); loss_of(a).backward(); return [x.grad]
tryit(tw,"several",mk(s))
def s(m,x):
    with torch.autograd.detect_anomaly(check_nan=False): y=m(x); loss_of(y).backward()
    return [y,x.grad]
tryit(tw,"anomaly",mk(s))
def s(m,x):
    y=m(x)
    with torch.autograd.detect_anomaly(check_nan=False): loss_of(y).backward()
    return [y,x.grad]
tryit(tw,"anomaly bw",mk(s))
print("--- mutation")
def s(m,x):
    y=m.inside(x*1); y.mul_(2); loss_of(y).backward(); return [y,x.grad]
tryit(tw,"output allowed",mk(s))
sig=wrapped(body(lambda self,x: torch.sigmoid(self.lin(x)), lin=nn.Linear(SIZE,SIZE)))
refused(sig,"saved output",mk(s))
def s(m,x):
    z=x*1; y=m.inside(z); z.mul_(2); loss_of(y).backward(); return [y,x.grad]
refused(tw,"input",mk(s))
def s(m,x):
    y=m(x); 
    with torch.no_grad(): W(m).add_(0.0)
    loss_of(y).backward(); return [y,x.grad]
refused(tw,"weight",mk(s))
def s(m,x):
    y=m(x); 
    with torch.no_grad(): m.inside.up.bias.add_(1.0)
    loss_of(y).backward(); 
    with torch.no_grad(): m.inside.up.bias.add_(-1.0)
    return [y,x.grad]
tryit(tw,"bias",mk(s))
def s(m,x):
    old=[p.data for p in m.parameters()]
    y=m(x)
    for p in m.parameters(): p.data=p.data*2+1
    loss_of(y).backward(); 
    for p,o in zip(m.parameters(),old): p.data=o
    return [y,x.grad]
tryit(tw,"data",mk(s))
def s(m,x):
    old=m.inside.w.data
    y=m(x)
    m.inside.w.data=old*3
    loss_of(y).backward(); 
    m.inside.w.data=old
    return [y,x.grad]
tryit(tw,"data of w",mk(s))
for n in (SIZE,):
  for big in (False,True):
    bufm=body(lambda self,x: F.gelu(self.lin(x)*self.buf.flatten()[:SIZE])*self.buf.flatten()[:SIZE], lin=nn.Linear(SIZE,SIZE)); bufm.register_buffer("buf",torch.ones(SIZE*(1 if not big else 1<<17)))
    try: bt=wrapped(bufm)
    except AssertionError as e: print("FAIL settle buf",e); continue
    def s(m,x):
        y=m(x); m.inside.buf.add_(1); loss_of(y).backward(); return [y,x.grad]
    tryit(bt,"buffer big %s"%big,mk(s)) if 0 else refused(bt,"buffer big %s"%big,mk(s))
    bufm=body(lambda self,x: F.gelu(self.lin(x)+self.buf.flatten()[:SIZE]), lin=nn.Linear(SIZE,SIZE)); bufm.register_buffer("buf",torch.ones(SIZE*(1 if not big else 1<<17)))
    bt=wrapped(bufm)
    tryit(bt,"unsaved buffer big %s"%big,mk(s))
print("--- outputs")
two=captured_twins(body(lambda self,x: (self.a(x), self.b(torch.tanh(x))), a=nn.Linear(SIZE,SIZE),b=nn.Linear(SIZE,SIZE)), tokens()) if 0 else None
t2=Twins(Around(body(lambda self,x: (self.a(x)*self.b(x), self.b(torch.tanh(x))), a=nn.Linear(SIZE,SIZE),b=nn.Linear(SIZE,SIZE))))
t2.settle(train(tokens()))
def s(m,x): a,b=m(x); loss_of(a).backward(); return [a,b,x.grad]
tryit(t2,"first",mk(s))
def s(m,x): a,b=m(x); loss_of(b).backward(); return [a,b,x.grad]
tryit(t2,"second",mk(s))
def s(m,x): a,b=m(x); loss_of(b).backward(retain_graph=True); loss_of(a).backward(); return [a,b,x.grad]
tryit(t2,"each",mk(s))
def s(m,x):
    z=x*2; a,b=m(z); c=z.sin(); (loss_of(a)+loss_of(c)).backward(); return [a,b,x.grad]
tryit(t2,"first, outside",mk(s))
