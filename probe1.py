import sys, time
sys.path += ["tests/compiled","tests/engine"]
from capture_testing import *
import torch.nn.functional as F
torch.manual_seed(0)
class MLP(nn.Module):
    def __init__(s, n=SIZE):
        super().__init__(); s.norm=nn.LayerNorm(n); s.up=nn.Linear(n,2*n); s.down=nn.Linear(2*n,n); s.scale=1.5; s.flag=True; s.drop=nn.Dropout(0.0)
    def forward(s,x):
        y = s.down(F.gelu(s.up(s.norm(x))))
        if s.flag: y = y * s.scale
        return x + s.drop(y)
t=time.time()
tw = captured_twins(MLP(), tokens()); print("settled", time.time()-t)
x = tokens(); st = train(x)
def tryit(name, change, step=st, undo=None):
    try:
        tw.both(change); print(name, "code", tw.runs_code(step), tw.runs_code(step))
    except BaseException as e: print("FAIL", name, type(e).__name__, str(e)[:300])
def inside(f): return lambda m: f(m.inside)
tryit("scale", inside(lambda m: setattr(m,'scale',2.0)))
tryit("flag", inside(lambda m: setattr(m,'flag',False)))
tryit("flagback", inside(lambda m: (setattr(m,'flag',True),setattr(m,'scale',1.5))))
tryit("p", inside(lambda m: setattr(m.drop,'p',.5)))
tryit("p", inside(lambda m: setattr(m.drop,'p',.0)))
hs=[]
tryit("fhook", inside(lambda m: hs.append(m.up.register_forward_hook(lambda m,a,o:o*2))))
[h.remove() for h in hs]; hs.clear()
tryit("prehook", inside(lambda m: hs.append(m.up.register_forward_pre_hook(lambda m,a:(a[0]*2,)))))
[h.remove() for h in hs]; hs.clear()
tryit("bwhook", inside(lambda m: hs.append(m.up.register_full_backward_hook(lambda m,gi,go:(gi[0]*2,)))))
[h.remove() for h in hs]; hs.clear()
import torch.nn.modules.module as mm
tryit("globhook", lambda m: hs.append(mm.register_module_forward_hook(lambda m,a,o:o*2)) if not hs else None)
[h.remove() for h in hs]; hs.clear()
tryit("none", lambda m: None)
tryit("module", inside(lambda m: setattr(m,'norm',nn.Identity())))
tryit("module2", inside(lambda m: (torch.manual_seed(3), setattr(m,'up',nn.Linear(SIZE,2*SIZE,bias=False)))))
tryit("module3", inside(lambda m: (torch.manual_seed(3), setattr(m,'up',nn.Linear(SIZE,2*SIZE)),setattr(m,'norm',nn.LayerNorm(SIZE)))))
tryit("weight", inside(lambda m: (torch.manual_seed(4), setattr(m.up,'weight',nn.Parameter(torch.randn(2*SIZE,SIZE))))))
tryit("reqgrad", inside(lambda m: m.up.weight.requires_grad_(False)))
tryit("reqgrad", inside(lambda m: m.up.weight.requires_grad_(True)))
tryit("patch forward", inside(lambda m: setattr(m.up,'forward',lambda x: F.linear(x, m.up.weight)*3)))
tryit("unpatch forward", inside(lambda m: delattr(m.up,'forward')))
tryit("eval", lambda m: m.eval())
tryit("train", lambda m: m.train())
tryit("shape", lambda m: None, train(tokens(3,SIZE)))
tryit("shape3", lambda m: None, train(tokens(2,3,SIZE)))
tryit("double", lambda m: m.double(), train(tokens(dtype=torch.float64)))
tryit("float", lambda m: m.float(), st)
tryit("strides", lambda m: None, train(tokens(SIZE,ROWS).detach().t().requires_grad_()))
tryit("nograd input", lambda m: None, train(tokens(grad=False)))
print(tw.handle.explain().split("\n\n")[1])
