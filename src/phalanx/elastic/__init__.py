"""Training that goes on when ranks are lost, and takes in others: steps that happen on all ranks or on none.

```python
state = px.elastic.State(model=model, optimizer=optimizer, sampler=px.elastic.Sampler(len(data), 64))
for step in px.elastic.steps(world, state, total=1000):
    with step:                                  # takes PeerLost: the step is done again with the ranks that are left
        loss = train(step.batch)
        step.group.all_reduce(gradients, op="mean")
        optimizer.step()
```
"""

from .loop import ElasticStep, steps
from .sampler import Sampler
from .state import State

__all__ = ["ElasticStep", "Sampler", "State", "steps"]
