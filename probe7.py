exec(open("probe3.py").read().split("tw=wrapped(MLP());")[0])
st=train(tokens())
def nest(*rules):
    return {"rules":[{"match":m,"action":a,**({"via":"hook"} if a=="recompute" else {}),**o} for m,a,o in rules]}
for name,rules in {
 "keep": nest(("inside.norm","keep",{}),("inside","recompute",{})),
 "price": nest(("inside.norm","recompute",{"price":1e3}),("inside","recompute",{})),
 "ckpt": nest(("inside.up","checkpoint",{}),("inside","recompute",{})),
}.items():
    tw=Twins(Around(MLP()),rules)
    for i in range(9): tw.step(st)
    print(name, tw.is_captured, tw.runs_code(st), tw.why_not, [r.is_captured for r in tw.regions])
