exec(open("probe3.py").read().split("tw=wrapped(MLP());")[0])
for rules in (rule(), rule(capture=False)):
    tw=Twins(Around(MLP(),before=nn.Linear(SIZE,SIZE),after=nn.Linear(SIZE,SIZE)),rules); st=train(tokens())
    for i in range(7): tw.step(st)
    if tw.is_captured: print(tw.regions[0]._graphs()[0]._programs[0].backward.source, tw.regions[0]._graphs()[0]._programs[0].held)
    for name,_ in tw.plain.named_parameters():
        def s(m,x):
            p=m.get_parameter(name); old=p.data
            y=m(x); p.data=p.data*2+1
            loss_of(y).backward(); p.data=old
            return [y,x.grad]
        tryit(tw,"data "+name,mk(s))
