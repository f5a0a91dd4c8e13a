exec(open("probe3.py").read().split("tw=wrapped(MLP());")[0])
print("--- Q")
from recompute.engine import recipe
class Norm(nn.Module):
    def __init__(s): super().__init__(); s.weight=nn.Parameter(1+torch.rand(SIZE))
    def forward(s,x): 
        return s.weight*(x*torch.rsqrt(x.pow(2).mean(-1,keepdim=True)+1e-6))
class M(nn.Module):
    def __init__(s): super().__init__(); s.inside=Norm(); s.a=nn.Linear(SIZE,SIZE); s.b=nn.Linear(SIZE,SIZE)
    def forward(s,x):
        y=s.inside(x); return s.a(y), s.b(y.detach())
tw=Twins(M()); st=train(tokens()); tw.settle(st)
print(tw.regions[0]._graphs()[0]._programs[0].outputs)
def s(m,x):
    a,b=m(x); loss_of(a).backward(); loss_of(b).backward(); return [a,b,x.grad]
tryit(tw,"detached consumer later",mk(s))
def s(m,x):
    a,b=m(x); loss_of(b).backward(); loss_of(a).backward(); return [a,b,x.grad]
tryit(tw,"detached consumer before",mk(s))
def s(m,x):
    a,b=m(x); g,=G(loss_of(a),x,create_graph=True); (g.sum()+loss_of(b)).backward(); return [a,b,x.grad]
tryit(tw,"double with outputs",mk(s))
# chain: regions whose input is another region's output, double backward
class C(nn.Module):
    def __init__(s): super().__init__(); s.inside=nn.ModuleList([Norm(),Norm()]); s.a=nn.Linear(SIZE,SIZE)
    def forward(s,x):
        return s.a(s.inside[1](s.inside[0](x)))
tw=Twins(C(),rule("inside.*")); tw.settle(st)
def s(m,x):
    y=m(x); g,=G(loss_of(y),x,create_graph=True); g.pow(2).sum().backward(); return [y,g,x.grad]
tryit(tw,"double chain",mk(s))
def s(m,x):
    y=m(x); l=loss_of(y); l.backward(retain_graph=True); l.backward(); return [y,x.grad]
tryit(tw,"retain chain",mk(s))
print("--- outputs none hooks")
class Two(nn.Module):
    def forward(s,x,z): return x.sin()*2, z.cos()*3
class D(nn.Module):
    def __init__(s): super().__init__(); s.inside=Two(); s.l=nn.Linear(SIZE,SIZE); s.k=nn.Linear(SIZE,SIZE)
    def forward(s,x): 
        z=s.l(x); 
        s.z=z
        return s.inside(s.k(x),z)
tw=Twins(D()); tw.settle(st)
class Mat(torch.autograd.Function):
    @staticmethod
    def forward(ctx,x): return x*2
    @staticmethod
    def backward(ctx,g): return g*2
def s(m,x):
    seen=[]
    a,b=m.inside(x.exp(),Mat.apply(m.l(x))); loss_of(a).backward(); return [a,b,x.grad,m.l.weight.grad]
tryit(tw,"custom upstream None",mk(s))
def s(m,x):
    z=m.l(x); z.register_hook(lambda g:g*2); a,b=m.inside(x.exp(),z); loss_of(a).backward(); return [a,b,x.grad,m.l.weight.grad]
tryit(tw,"hook upstream None",mk(s))
def s(m,x):
    h=m.l.weight.register_hook(lambda g:g*2); a,b=m.inside(x.exp(),m.l(x)); loss_of(a).backward(); h.remove(); return [a,b,x.grad,m.l.weight.grad]
tryit(tw,"param hook upstream None",mk(s))
par=Twins(Around(body(lambda self,x:(self.a(x),self.b(x)),a=nn.Linear(SIZE,SIZE),b=nn.Linear(SIZE,SIZE)))).settle(st)
def s(m,x):
    seen=[]; h=m.inside.b.weight.register_hook(lambda g:seen.append(g)); hp=m.inside.b.weight.register_post_accumulate_grad_hook(lambda g:seen.append(1)); a,b=m(x); loss_of(a).backward(); h.remove(); hp.remove(); return [a,b,x.grad,len(seen)]
tryit(par,"param hook None",mk(s))
print("--- shared weight")
class S(nn.Module):
    def __init__(s): 
        super().__init__(); s.inside=nn.ModuleList([nn.Sequential(nn.Linear(SIZE,SIZE),nn.GELU()) for _ in range(3)]); 
        s.inside[1][0].weight=s.inside[0][0].weight; s.w=s.inside[0][0].weight
    def forward(s,x):
        y=F.linear(x,s.w); y=s.inside[0](y)*2; y=F.linear(y,s.w); return F.linear(s.inside[1](y)+y,s.w)
tw=Twins(S(),rule("inside.*")); 
for i in range(8): tw.step(st)
tryit(tw,"shared",st)
tw=captured_twins(body(lambda self,x: self.a(F.gelu(self.a(x))+self.a(x*2)), a=nn.Linear(SIZE,SIZE)),tokens())
tryit(tw,"twice in one",st)
