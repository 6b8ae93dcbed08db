"""Remote calls: functions and objects on other ranks, by name.

```python
agent = px.rpc.Agent(world)

@agent.register
def add(a: float, b: float) -> float:
    return a + b

agent.call(1, "add", 2, 3)
```
"""

from .agent import Agent
from .classic.agent import ClassicAgent
from .context import CallContext, current_call, time_left
from .remote_object import RemoteObject
from .stream import RemoteStream

__all__ = ["Agent", "CallContext", "ClassicAgent", "RemoteObject", "RemoteStream", "current_call", "time_left"]
