exec(open("probe3.py").read().split("tw=wrapped(MLP());")[0])
import warnings, copy, pickle, io, contextlib
st=train(tokens())
def loose(mod, steps=9, step=st, rules=None):
    tw=Twins(Around(mod),rules)
    for i in range(steps): tw.step(step)
    return tw
print("--- rng")
L=lambda: nn.Linear(SIZE,SIZE)
for name,f in {
 "dropout": lambda self,x: self.lin(F.dropout(F.gelu(self.lin(x)),0.3)),
 "bernoulli": lambda self,x: self.lin(x)*torch.bernoulli(torch.full((SIZE,),.5)),
 "rand_like": lambda self,x: F.gelu(self.lin(x)+torch.rand_like(x)),
 "randn": lambda self,x: F.gelu(self.lin(x)*torch.randn(SIZE)),
 "randperm": lambda self,x: self.lin(x)[torch.randperm(ROWS)],
 "inplace": lambda self,x: self.lin(x)*torch.empty(SIZE).uniform_(),
 "gumbel": lambda self,x: F.gumbel_softmax(self.lin(x)),
 "rrelu": lambda self,x: F.rrelu(self.lin(x),training=True),
 "sdpa": lambda self,x: F.scaled_dot_product_attention(self.lin(x)[None,None],x[None,None],x[None,None],dropout_p=0.3)[0,0],
 "alphadrop": lambda self,x: F.alpha_dropout(self.lin(x),0.3,training=True),
}.items():
    try: tw=loose(body(f,lin=L())); print(name, tw.is_captured, tw.why_not, tw.runs_code(st))
    except BaseException as e: print("FAIL",name,type(e).__name__,str(e)[:300])
def gen(self,x): return self.lin(x)*torch.rand(SIZE,generator=self.g[0])
try:
    tw=Twins(Around(body(gen,lin=L())))
    tw.plain.inside.g=[torch.Generator().manual_seed(1)]; tw.under.inside.g=[torch.Generator().manual_seed(1)]
    for i in range(9): tw.step(st)
    print("gen", tw.is_captured, tw.why_not)
except BaseException as e: print("FAIL gen",type(e).__name__,str(e)[:300])
import random, numpy as np
def pyr(self,x): return self.lin(x)*random.random()
def npr(self,x): return self.lin(x)*float(np.random.rand())
def seeded(f):
    def s(m): random.seed(3); np.random.seed(3); r=st(m); r["py"]=torch.tensor(random.random()); r["np"]=torch.tensor(np.random.rand()); return r
    return s
for n,f in (("py",pyr),("np",npr)):
    try: tw=loose(body(f,lin=L()),step=seeded(0)); print(n,tw.is_captured,tw.why_not)
    except BaseException as e: print("FAIL",n,type(e).__name__,str(e)[:300])
ONLY=lambda l:[t for t in l if not sys.argv[1:] or t[0] in sys.argv[1:]]
print("--- side effects")
def cache(self,x):
    y=self.lin(x); self.last=y; self.kv["k"]=torch.cat([self.kv["k"],y.detach()]) if len(self.kv["k"])<12 else y.detach(); return F.gelu(y)
class KV: pass
def kvs(m):
    r=st(m); r["kv"]=m.inside.kv["k"].clone(); r["last"]=m.inside.last; return r
try:
    mod=body(cache,lin=L(),kv={"k":torch.zeros(0,SIZE)}); tw=loose(mod,step=kvs,steps=14); print("cache",tw.is_captured,tw.why_not)
except BaseException as e: print("FAIL","cache",type(e).__name__,str(e)[:300])
def appendt(self,x): 
    y=self.lin(x); self.seen.append(y.detach()); return F.gelu(y)
def s(m):
    r=st(m); r["n"]=torch.tensor(len(m.inside.seen)); r["l"]=m.inside.seen[-1]; return r
try: tw=loose(body(appendt,lin=L(),seen=[]),step=s); print("append",tw.is_captured,tw.why_not)
except BaseException as e: print("FAIL","append",type(e).__name__,str(e)[:300])
def argkv(self,x,kv):
    y=self.lin(x); kv.append(y); return F.gelu(y)
def s(m):
    kv=[]; x=fresh(x0); y=m(x,kv); (loss_of(y)+loss_of(kv)).backward(); return [y,x.grad,*kv]
try: tw=loose(body(argkv,lin=L()),step=s); print("argkv",tw.is_captured,tw.why_not)
except BaseException as e: print("FAIL","argkv",type(e).__name__,str(e)[:300])
def setlast(self,x):
    y=self.lin(x); self.last=y.detach().mean(); return F.gelu(y)
def s(m):
    r=st(m); r["l"]=m.inside.last; return r
try: tw=loose(body(setlast,lin=L(),last=None),step=s); print("setlast",tw.is_captured,tw.why_not)
except BaseException as e: print("FAIL","setlast",type(e).__name__,str(e)[:300])
def pr(self,x): print("hello",end=";"); return self.lin(x)
def s(m):
    b=io.StringIO()
    with contextlib.redirect_stdout(b): r=st(m)
    r["text"]=b.getvalue(); return r
def wn(self,x): warnings.warn("careful"); return self.lin(x)
def sw(m):
    with warnings.catch_warnings(record=True) as c: warnings.simplefilter("always"); r=st(m)
    r["w"]=len([x for x in c if "careful" in str(x.message)]); return r
import logging
log=logging.getLogger("zz"); hits=[]; log.addHandler(type("H",(logging.Handler,),{"emit":lambda s,r:hits.append(1)})()); log.setLevel(10)
def lg(self,x): log.warning("hi"); return self.lin(x)
def sl(m):
    hits.clear(); r=st(m); r["h"]=len(hits); return r
def nump(self,x): return self.lin(x)*float(np.tanh(0.5))
def nump2(self,x): return self.lin(x)*torch.from_numpy(np.tanh(x.detach().numpy()))
def item(self,x): return self.lin(x)*(2 if x.sum().item()>0 else 3)
def item2(self,x): return self.lin(x)*x.detach().sum().item()
def item3(self,x): return self.lin(x)*x.detach().sum().tolist()
def branch(self,x): return self.lin(x) if x.sum()>0 else self.lin(x)*2
def comp(self,x): return self.lin(x)*(2 if torch.compiler.is_compiling() else 3)
def comp2(self,x):
    a,b=F.gelu(self.lin(x)),torch.tanh(self.lin(x)); return (a,b) if torch.compiler.is_compiling() else (b,a)
def comp3(self,x):
    y=F.gelu(self.lin(x))
    if not torch.compiler.is_compiling(): self.n+=1
    return y
def comp4(self,x):
    y=F.gelu(self.lin(x)); return (y, 1.0 if torch.compiler.is_compiling() else 2.0)
def cnt(m):
    r=st(m); r["n"]=m.inside.n; return r
def isgrad(self,x): return self.lin(x)*(2 if torch.is_grad_enabled() else 1)
def nested(self,x):
    z=x.detach().requires_grad_()
    with torch.enable_grad(): g,=torch.autograd.grad(self.lin(z).sum(),z)
    return self.lin(x)*g
def nograd(self,x):
    with torch.no_grad(): s=self.lin(x).abs().amax()
    return F.gelu(self.lin(x)/s)
def inpl(self,x):
    y=self.lin(x); y.mul_(2).add_(1); y=F.relu(y,inplace=True); return self.lin(y)
def inpl2(self,x):
    y=self.lin(x); y[0]=1.0; z=y.clone(); z[:,1:3]*=2; return F.gelu(z)
def inpin(self,x):
    x=x.mul_(2); return self.lin(x)
def sin_(m):
    x=fresh(x0); z=x*1; y=m(z); loss_of(y).backward(); return [y,x.grad,z]
def bn(self,x): return F.gelu(self.bn(self.lin(x)))
def buf(self,x): self.count.add_(1); return self.lin(x)*self.count
def bufset(self,x): self.count=self.count*0.5; return self.lin(x)*self.count
def custom(self,x): return Mat.apply(self.lin(x))
class Mat(torch.autograd.Function):
    @staticmethod
    def forward(ctx,x): ctx.save_for_backward(x); return x*2
    @staticmethod
    def backward(ctx,g): x,=ctx.saved_tensors; return g*x
def hook(self,x):
    y=self.lin(x); y.register_hook(lambda g:g*2); return F.gelu(y)
def hookpy(self,x):
    y=self.lin(x); y.register_hook(lambda g:self.got.append(1)); return F.gelu(y)
def retgrad(self,x): y=self.lin(x); y.retain_grad(); self.y=y; return F.gelu(y)
def retin(self,x): return x, self.lin(x)
def retview(self,x): return self.lin(x).view(2,-1), self.lin(x)[1:]
def retview2(self,x): y=self.lin(x); return y[:2],y[2:]
def none(self,x): return self.lin(x), None, {"a":[3,x.shape[0]]}
def hidden(self,x): return (F.gelu(self.lin(x)).detach(), self.lin(x))
def ckpt(self,x): return torch.utils.checkpoint.checkpoint(lambda z:F.gelu(self.lin(z)),x,use_reentrant=False)
def ckptr(self,x): return torch.utils.checkpoint.checkpoint(lambda z:F.gelu(self.lin(z)),x,use_reentrant=True)
def kp(self,x): return F.gelu(recompute.keep(F.gelu(self.lin(x))))
def kpn(self,x): return F.gelu(recompute.keep(F.gelu(self.lin(x)),"mid"))
def ac(self,x):
    with torch.autocast("cpu",torch.bfloat16): y=self.lin(x)
    return F.gelu(y.float())
def vm(self,x): return F.gelu(torch.vmap(lambda r:self.lin(r))(x))
def fgrad(self,x): return F.gelu(self.lin(x))*torch.func.grad(lambda z:z.sin().sum())(x.detach())
def fjvp(self,x): return F.gelu(self.lin(x))*torch.func.jvp(torch.sin,(x.detach(),),(x.detach(),))[1]
def embed(self,x): return self.emb((x>0).long()[:,0])*self.lin(x)
def idx(self,x): y=self.lin(x); return y[y.detach()[:,0]>0]
def topk(self,x): y=self.lin(x); v,i=y.topk(3); return v*y.gather(1,i)
def lstm(self,x): return self.lstm(x)[0]
def cplx(self,x): return torch.fft.irfft(torch.fft.rfft(self.lin(x)))
def dd(self,x): return self.lin(x)*torch.arange(SIZE)*torch.linspace(0,1,SIZE)
def ep(self,x): return self.lin(x).expand(3,ROWS,SIZE)
def dtype(self,x): return F.gelu(self.lin(x).to(torch.bfloat16)).float()
def dup(self,x): y=F.gelu(self.lin(x)); return y,y
def dist(self,x): return torch.distributions.Normal(self.lin(x),1.0).rsample()
def glob(self,x):
    global COUNT; COUNT+=1; return F.gelu(self.lin(x))
COUNT=0
def sg(m):
    global COUNT; COUNT=0; r=st(m); r["c"]=COUNT; return r
for n,f,step in ONLY([("print",pr,s),("warn",wn,sw),("log",lg,sl),("numpy const",nump,st),("numpy",nump2,st),("item",item,st),("item2",item2,st),("tolist",item3,st),("branch",branch,st),("comp",comp,st),("comp2",comp2,st),("comp3",comp3,cnt),("comp4",comp4,st),("isgrad",isgrad,st),("nested",nested,st),("nograd",nograd,st),("inplace",inpl,st),("inplace2",inpl2,st),("inplace input",inpin,sin_),("bn",bn,st),("buf",buf,st),("bufset",bufset,st),("custom",custom,st),("hook",hook,st),("hookpy",hookpy,st),("retgrad",retgrad,st),("retin",retin,st),("retview",retview,st),("retview2",retview2,st),("none",none,st),("hidden",hidden,st),("ckpt",ckpt,st),("ckptr",ckptr,st),("keep",kp,st),("keepn",kpn,st),("autocast",ac,st),("vmap",vm,st),("fgrad",fgrad,st),("jvp",fjvp,st),("embed",embed,st),("idx",idx,st),("topk",topk,st),("lstm",lstm,st),("cplx",cplx,st),("factories",dd,st),("expand",ep,st),("dtype",dtype,st),("dup",dup,st),("dist",dist,st),("global",glob,sg)]):
    mod=body(f,lin=L(),bn=nn.BatchNorm1d(SIZE),emb=nn.Embedding(3,SIZE),n=0,got=[],y=None,lstm=nn.LSTM(SIZE,SIZE)); mod.register_buffer("count",torch.ones(1))
    if n!="bn": del mod.bn
    if n!="embed": del mod.emb
    if n!="lstm": del mod.lstm
    if n=="lstm": del mod.lin
    try: tw=loose(mod,step=step,steps=10); print(n,tw.is_captured,tw.runs_code(step),tw.why_not[:150])
    except BaseException as e: print("FAIL",n,type(e).__name__,str(e)[:300])
