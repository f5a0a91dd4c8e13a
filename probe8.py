exec(open("probe3.py").read().split("tw=wrapped(MLP());")[0])
import copy,pickle,threading
from torch.utils._python_dispatch import TorchDispatchMode
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
st=train(tokens())
class DM(TorchDispatchMode):
    def __torch_dispatch__(self,op,types,args=(),kwargs=None):
        o=op(*args,**(kwargs or {})); return o+1 if op is torch.ops.aten.mul.Tensor else o
class FM(TorchFunctionMode):
    def __torch_function__(self,f,types,args=(),kwargs=None):
        o=f(*args,**(kwargs or {})); return o*2 if getattr(f,"__name__","")=="gelu" else o
class Count(TorchDispatchMode):
    def __init__(s): super().__init__(); s.n=0
    def __torch_dispatch__(self,op,types,args=(),kwargs=None):
        self.n+=1; return op(*args,**(kwargs or {}))
from contextlib import nullcontext
def wrap(fw=None,bw=None):
    def s(m,x):
        with (fw() if fw else nullcontext()): y=m(x)
        with (bw() if bw else nullcontext()): loss_of(y).backward()
        return [y,x.grad]
    return mk(s)
tw=wrapped(MLP())
tryit(tw,"dispatch fw",wrap(DM)); tryit(tw,"fn fw",wrap(FM)); tryit(tw,"dispatch bw",wrap(None,Count))
tryit(tw,"fn bw",wrap(None,FM));tryit(tw,"dispatch plusone bw",wrap(None,DM))
tryit(tw,"save_on_cpu",wrap(lambda: torch.autograd.graph.save_on_cpu()))
tryit(tw,"hooks",wrap(lambda: torch.autograd.graph.saved_tensors_hooks(lambda t:t*1, lambda t:t*1)))
tryit(tw,"hooks nohooks",wrap(lambda: torch.autograd.graph.disable_saved_tensors_hooks("no")))
for r in (True,False):
    def s(m,x): y=checkpoint(m,x,use_reentrant=r); loss_of(y).backward(); return [y,x.grad]
    tryit(tw,"checkpoint reentrant %s"%r,mk(s))
    def s(m,x): y=checkpoint(m.inside,x*1,use_reentrant=r); y=checkpoint(m.inside,y,use_reentrant=r); loss_of(y).backward(); return [y,x.grad]
    tryit(tw,"checkpoint inner reentrant %s"%r,mk(s))
def s(m,x):
    p=dict(m.named_parameters()); g=torch.func.grad(lambda p:loss_of(torch.func.functional_call(m,p,(x.detach(),))))(p); return list(g.values())
tryit(tw,"func.grad",mk(s))
def s(m,x):
    p={k:v.detach().clone().requires_grad_() for k,v in m.named_parameters()}; y=torch.func.functional_call(m,p,(x,)); loss_of(y).backward(); return [y,x.grad]+[v.grad for v in p.values()]
tryit(tw,"functional_call",mk(s))
def s(m,x): return torch.vmap(m)(x.detach())
tryit(tw,"vmap",mk(s))
import torch.autograd.forward_ad as fwAD
def s(m,x):
    with fwAD.dual_level(): return list(fwAD.unpack_dual(m(fwAD.make_dual(x.detach(),torch.ones_like(x)))))
tryit(tw,"fwad",mk(s))
def s(m,x): return [torch.autograd.functional.jacobian(m,x.detach())]
tryit(tw,"jacobian",mk(s))
def s(m,x):
    with recompute.verifying(): y=m(x); loss_of(y).backward()
    return [y,x.grad]
tryit(tw,"verifying",mk(s))
try: print(recompute.verify(tw.under, (tokens(),)) if hasattr(recompute,"verify") else "")
except Exception as e: print("verify",type(e).__name__,str(e)[:300])
tw.both(lambda m:m.zero_grad())
# deepcopy, pickle
c=copy.deepcopy(tw.under)
for i in range(8):
    c.zero_grad(); tw.plain.zero_grad(); a=observed(c,st); b=observed(tw.plain,st); assert_same(a,b)
print("deepcopy ok")
import types
try:
    class PM(nn.Module): pass
    o=Around(nn.Sequential(nn.Linear(SIZE,SIZE),nn.GELU())); t=Twins(o); t.settle(st); b=pickle.dumps(t.under); u=pickle.loads(b); assert_same(observed(u,st),observed(t.plain,st)); print("pickle ok")
except Exception as e: print("FAIL pickle",type(e).__name__,str(e)[:300])
try:
    t=captured_twins(MLP(),tokens()); 
    cm=torch.compile(t.under,backend="aot_eager"); cp=torch.compile(t.plain,backend="aot_eager")
    t.both(lambda m:m.zero_grad())
    a=observed(cm,st); b=observed(cp,st); assert_same(a,b); print("compile ok"); tryit(t,"after compile",st)
except Exception as e: print("FAIL compile",type(e).__name__,str(e)[:300])
torch._dynamo.reset(); tryit(tw,"after reset",st)
t=captured_twins(MLP(),tokens())
x=fresh(x0); y=t.under(x); t.handle.remove(); loss_of(y).backward()
x2=fresh(x0); y2=t.plain(x2); loss_of(y2).backward(); print("remove", torch.equal(x.grad,x2.grad), [r.is_captured for r in t.regions])
t.both(lambda m:m.zero_grad()); tryit(t,"removed",st)
# threads
t=captured_twins(MLP(),tokens())
exp=observed(t.plain,st); t.both(lambda m:m.zero_grad())
res=[]
def work():
    for _ in range(30):
        x=tokens(); y=t.under(x); g=G(loss_of(y),x)[0]; y2=t.plain(x); g2=G(loss_of(y2),x)[0]; res.append(torch.equal(y,y2) and torch.equal(g,g2))
def fresh_threads(m):
    th=[threading.Thread(target=work) for _ in range(4)]; [a.start() for a in th]; [a.join() for a in th]
fresh_threads(0); print("threads", len(res), all(res))
torch.manual_seed(0)
mod=Around(MLP()); t=Twins(mod); res.clear(); fresh_threads(0); print("threads from start", len(res), all(res), t.is_captured, t.why_not)
