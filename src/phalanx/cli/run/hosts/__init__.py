"""`phalanx run --hosts`: one job on several hosts, started from one terminal over ssh.

`hostfile` reads who the hosts are. The `controller` starts one `node` on each of them over a `connection` (an ssh
process), and speaks with it in `messages`: the job and signals go to its standard input; lines of the ranks come from
its outputs, and between them its own words. A node is a launcher as on several nodes by hand, with two differences: it
takes signals from its standard input, whose end means that the controller is gone, and it tells its verdict to the
controller instead of printing it. `explain` has words for all that can go wrong with ssh.
"""

from __future__ import annotations
