import sys, time
sys.path += ["tests/compiled","tests/engine"]
from capture_testing import *
import torch.nn.functional as F
from recompute.errors import *
def tryit(tw, name, change, step, undo=None):
    try:
        tw.both(change); print(name, "code", tw.runs_code(step), tw.runs_code(step))
    except BaseException as e: print("FAIL", name, type(e).__name__, str(e)[:300])
def direct(module, step, rules=None, **k):
    tw = Twins(Around(module), rules)
    try: tw.settle(step)
    except AssertionError as e: print("FAIL settle", str(e)[:300])
    return tw
class MLP(nn.Module):
    def __init__(s, n=SIZE):
        super().__init__(); s.norm=nn.LayerNorm(n); s.up=nn.Linear(n,2*n); s.down=nn.Linear(2*n,n)
    def forward(s,x):
        return x + s.down(F.gelu(s.up(s.norm(x))))
print("--- reqgrad")
st=train(tokens()); tw=direct(MLP(),st)
tryit(tw,"off",lambda m:m.inside.up.weight.requires_grad_(False),st)
tryit(tw,"on",lambda m:m.inside.up.weight.requires_grad_(True),st)
tryit(tw,"on",lambda m:m.inside.up.weight.requires_grad_(True),st)
tryit(tw,"nograd x",lambda m:0,train(tokens(grad=False)))
tryit(tw,"nograd x",lambda m:0,train(tokens(SIZE,ROWS).detach().t().requires_grad_()))
def slicestep(off):
    torch.manual_seed(5); big=torch.randn(10,SIZE)
    def step(m):
        b=big.clone().requires_grad_()
        y=m(b[off:off+ROWS]); loss_of(y).backward(); return [y,b.grad]
    return step
print("--- slices")
tw=direct(MLP(),slicestep(0)); tryit(tw,"slice2",lambda m:0,slicestep(2))
bits_=body(lambda self,x: self.lin(x*(x.view(torch.int32)%2==0)), lin=nn.Linear(SIZE,SIZE))
tw=direct(bits_,slicestep(0)); tryit(tw,"slice2",lambda m:0,slicestep(2))
strided=body(lambda self,x: self.lin(x*x.as_strided((ROWS,SIZE),(SIZE,1),SIZE).detach()), lin=nn.Linear(SIZE,SIZE))
tw=direct(strided,slicestep(0)); tryit(tw,"asstrided abs",lambda m:0,slicestep(2))
strided=body(lambda self,x: self.lin(x*x.detach().as_strided((ROWS,SIZE),(SIZE,1))), lin=nn.Linear(SIZE,SIZE))
tw=direct(strided,slicestep(0)); tryit(tw,"asstrided rel",lambda m:0,slicestep(2))
print("--- alias")
two=body(lambda self,x,y: self.lin(x)*torch.sigmoid(y)+x, lin=nn.Linear(SIZE,SIZE))
tw=direct(two,train(tokens(),tokens()))
def alias(m):
    torch.manual_seed(1); x=tokens(); y=m(x,x.view_as(x)); loss_of(y).backward(); return [y,x.grad]
tryit(tw,"alias view",lambda m:0,alias)
def alias(m):
    torch.manual_seed(1); x=tokens(); y=m(x,x); loss_of(y).backward(); return [y,x.grad]
tryit(tw,"alias same",lambda m:0,alias)
def alias(m):
    torch.manual_seed(1); x=tokens(); y=m(x,x.detach()); loss_of(y).backward(); return [y,x.grad]
tryit(tw,"alias detach",lambda m:0,alias)
print("--- grown list")
def grow(self,x):
    self.seen.append(float(len(self.seen))); return self.lin(x)*len(self.seen)
st=train(tokens())
tw=Twins(Around(body(grow,lin=nn.Linear(SIZE,SIZE),seen=[])))
for i in range(12): tw.step(st)
print(len(tw.plain.inside.seen),len(tw.under.inside.seen), tw.is_captured, tw.why_not)
def grow(self,x):
    self.seen.append(1.0); return self.lin(x)
tw=Twins(Around(body(grow,lin=nn.Linear(SIZE,SIZE),seen=[])))
for i in range(12): tw.step(st)
print(len(tw.plain.inside.seen),len(tw.under.inside.seen), tw.is_captured, tw.why_not)
def count(self,x):
    self.n+=1; return self.lin(x)
tw=Twins(Around(body(count,lin=nn.Linear(SIZE,SIZE),n=0)))
for i in range(50): tw.step(st)
print(tw.plain.inside.n,tw.under.inside.n, tw.is_captured, tw.why_not, len(tw.regions[0]._graphs()))
print("--- none")
opt=body(lambda self,x,mask=None: self.lin(x) if mask is None else self.lin(x)*mask, lin=nn.Linear(SIZE,SIZE))
tw=direct(opt,train(tokens()))
tryit(tw,"mask",lambda m:0,train(tokens(),tokens(grad=False)))
tryit(tw,"mask kw",lambda m:0,train(tokens(),mask=tokens(grad=False)))
tryit(tw,"none kw",lambda m:0,train(tokens(),mask=None))
print("--- settings")
act=body(lambda self,x: self.lin(x)*torch.ones(SIZE)*torch.tensor(0.1), lin=nn.Linear(SIZE,SIZE))
tw=direct(act,st)
def around(ctx, fw=True,bw=True):
    x0=tokens()
    def step(m):
        x=fresh(x0)
        from contextlib import nullcontext
        with (ctx() if fw else nullcontext()): y=m(x)
        with (ctx() if bw else nullcontext()): loss_of(y).backward()
        return [y,x.grad]
    return step
from contextlib import contextmanager
@contextmanager
def dd():
    torch.set_default_dtype(torch.float64)
    try: yield
    finally: torch.set_default_dtype(torch.float32)
tryit(tw,"ddfw",lambda m:0,around(dd,bw=False)); tryit(tw,"ddbw",lambda m:0,around(dd,fw=False));tryit(tw,"dd",lambda m:0,around(dd))
@contextmanager
def det():
    torch.use_deterministic_algorithms(True)
    try: yield
    finally: torch.use_deterministic_algorithms(False)
tryit(tw,"detfw",lambda m:0,around(det,bw=False)); tryit(tw,"detbw",lambda m:0,around(det,fw=False));tryit(tw,"det",lambda m:0,around(det))
tw=direct(MLP(),st)
ac=lambda: torch.autocast("cpu",torch.bfloat16)
tryit(tw,"acfw",lambda m:0,around(ac,bw=False)); tryit(tw,"acbw",lambda m:0,around(ac,fw=False));tryit(tw,"ac",lambda m:0,around(ac))
for nm in (torch.no_grad, torch.inference_mode):
    def ev(m):
        with nm(): return m(x0)
    x0=tokens(grad=False); tryit(tw,nm.__name__,lambda m:0,ev)
