"""Mistakes of newcomers: what somebody does, and the words that the message must have.

A message says what failed, where (the user's line, or the option), and what to do. Those under `CALLS` run one after
the other in a world of two, `world`, of which each has a copy `group` of its own to break; those under `ALONE` in one
process without a launcher, with some variables; those under `JOBS` are scripts under `phalanx run -n 2`; those under
`COMMANDS` are command lines.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["ALONE", "CALLS", "COMMANDS", "JOBS", "Mistake"]


@dataclass(frozen=True)
class Mistake:
    """One of them."""

    name: str
    program: str
    words: tuple[str, ...]
    variables: dict[str, str] = field(default_factory=dict)


CALLS = [
    # -- names and arguments
    Mistake("mean by another name", 'world.all_reduce(np.ones(3), op="avg")', ("did you mean 'mean'?",)),
    Mistake("sum by another name", 'world.all_reduce(np.ones(3), op="add")', ("did you mean 'sum'?",)),
    Mistake("torch's enumeration", "world.all_reduce(np.ones(3), op=TorchOp.SUM)", ("did you mean 'sum'?",)),
    Mistake("a second array", "world.all_reduce(np.ones(3), np.ones(3))", ("is not a reduction", "expected one of")),
    Mistake("flags in a row", 'world.all_reduce(np.ones(3), "sum", True)', ("timeout=, async_op= must be named",)),
    Mistake("root", "world.broadcast(np.ones(3), root=0)", ("did you mean 'src'?", "it takes x, src")),
    Mistake("dest", "world.send(np.ones(3), dest=1)", ("did you mean 'dst'?",)),
    Mistake("no src", "world.broadcast(np.ones(3))", ("broadcast() needs 'src'", "it takes x, src")),
    Mistake("verbs of the module", "px.all_reduce(np.ones(3))", ("phalanx.init()", "world.all_reduce")),
    Mistake("get_rank", "px.get_rank()", ("world.rank",)),
    Mistake("init_process_group", 'px.init_process_group("gloo")', ("phalanx.init()", "torch.distributed")),
    Mistake("mpi4py's names", "world.allreduce(np.ones(3))", ("did you mean 'all_reduce'?",)),
    Mistake("mpi4py's capitals", "world.Bcast(np.ones(3), 0)", ("did you mean 'broadcast'?",)),
    Mistake("size", "world.size", ("did you mean 'world_size'?",)),
    Mistake("a method that is a property", "world.get_rank()", ("did you mean 'rank'?",)),
    Mistake("new_group", "world.new_group([0])", ("did you mean 'subgroup'?",)),
    Mistake("a slip of the finger", "world.all_reducce(np.ones(3))", ("did you mean 'all_reduce'?",)),
    # -- arrays
    Mistake("a list", "world.all_reduce([1.0, 2.0])", ("list is not an array", "np.asarray")),
    Mistake("a list of arrays", "world.all_reduce([np.ones(3), np.ones(4)])", ("all_reduce_many",)),
    Mistake("a number", "world.all_reduce(3.0)", ("float is not an array", "np.array")),
    Mistake("a dict", 'world.all_reduce({"loss": 1.0})', ("dict is not an array", "all_gather_object")),
    Mistake("torch's all_gather", "world.all_gather(np.ones(3), out=[np.ones(3)])", ("out is a list", "returns it")),
    Mistake("objects in an array", "world.all_reduce(np.array([None]))", ("Python objects", "send_object")),
    Mistake("strings in an array", 'world.all_reduce(np.array(["a"]))', ("no reduction exists", "valid: ")),
    Mistake("the mean of integers", 'world.all_reduce(np.ones(3, int), op="mean")', ("for int64", "astype")),
    Mistake("bits of floats", 'world.all_reduce(np.ones(3), op="band")', ("for float64", "expected one of")),
    Mistake("another shape", "world.all_gather(np.ones(3), out=np.ones(5))", ("out is float64[5]", "float64[6]")),
    Mistake(
        "out of another dtype",
        "world.all_gather(np.ones(3), out=np.ones(6, np.float32))",
        ("out is float32[6]", "float64[6]"),
    ),
    Mistake("an odd length", "world.reduce_scatter(np.ones(3))", ("2 equal parts", "pad it")),
    Mistake("an odd length for all_to_all", "world.all_to_all(np.ones(3))", ("2 equal parts", "counts=")),
    Mistake(
        "nothing to scatter",
        "if rank == 0:\n    group.scatter(None, src=0)",
        ("x is None on rank 0", "scatter"),
    ),
    # -- ranks
    Mistake("a rank that is not there", "world.send(np.ones(3), dst=2)", ("rank 2 is not in this group", "0, 1")),
    Mistake("the last rank, as in a list", "world.broadcast(np.ones(3), src=-1)", ("rank -1 is not in this group",)),
    Mistake("a rank as text", 'world.broadcast(np.ones(3), src="0")', ("'0'", "a whole number from 0 to 1")),
    Mistake("a message to oneself", "world.send(np.ones(3), dst=rank)", ("itself", "copy it")),
    Mistake("a group of others", "world.subgroup([1 - rank]).barrier()", ("is not in this group (members:",)),
    Mistake("a member that is not there", "world.subgroup([rank, 7])", ("rank 7 is not in a world of 2",)),
    Mistake("a tag below zero", "world.send(np.ones(3), dst=1 - rank, tag=-1)", ("tag=-1", "expected a whole number")),
    # -- time
    Mistake("a timeout as text", 'world.barrier(timeout="10")', ("timeout='10'", "expected seconds")),
    Mistake("a timedelta", "world.barrier(timeout=timedelta(seconds=3))", ("expected seconds",)),
    Mistake("a timeout below zero", "world.barrier(timeout=-1)", ("timeout=-1", "expected seconds")),
    Mistake(
        "a call on one rank only",
        "if rank == 0:\n    group.barrier(timeout=0.3)",
        ("barrier #1 at mistake.py:2", "arrived: 0; missing: 1", "rank 1 is "),
    ),
    Mistake(
        "both wait for each other",
        "group.recv(src=1 - rank, timeout=0.3)",
        ("recv(src=", "waiting for:", "is in recv(src="),
    ),
    Mistake(
        "another tag",
        "group.send(np.ones(3), dst=1, tag=1) if rank == 0 else group.recv(src=0, tag=2, timeout=0.3)",
        ("recv(src=0, tag=2)", "not done within"),
    ),
    # -- ranks that do not do the same
    Mistake(
        "another verb on one rank",
        "group.all_reduce(np.ones(4)) if rank else group.all_gather(np.ones(4))",
        ("called all_reduce", "called all_gather", "mistake.py:1", "must call the same operations"),
    ),
    Mistake("another shape on one rank", "group.all_reduce(np.ones(4 + rank))", ("float64[4]", "float64[5]")),
    Mistake(
        "another dtype on one rank",
        "group.all_reduce(np.ones(4, np.float32 if rank else np.float64))",
        ("float64[4]", "float32[4]", "must call the same operations"),
    ),
    Mistake(
        "another reduction on one rank",
        'group.all_reduce(np.ones(4), op="max" if rank else "sum")',
        ("op=max", "op=sum"),
    ),
    Mistake("another root on one rank", "group.broadcast(np.ones(4), src=rank)", ("src=1", "src=0", "roots")),
    Mistake("unequal parts", "group.all_gather(np.ones(2 + rank))", ("different lengths", 'counts="auto"')),
    Mistake(
        "a place that is too small",
        "group.send(np.ones(4), dst=1) if rank == 0 else group.recv(np.ones(3), src=0)",
        ("rank 0 sent float64[4]", "out is float64[3]"),
    ),
    Mistake(
        "an object as an array",
        'group.send_object({"a": 1}, dst=1) if rank == 0 else group.recv(src=0)',
        ("sent an object", "recv_object"),
    ),
    # -- objects
    Mistake("a lambda as a message", "world.send_object(lambda: 1, dst=1 - rank)", ("type function", "allow_pickle")),
    Mistake("an open file as a message", "world.all_gather_object(open('/dev/null'))", ("TextIOWrapper", "expected")),
    Mistake("something odd inside", 'world.all_gather_object({"a": object()})', ("$['a']", "expected")),
    Mistake(
        "too large an object",
        "world.all_gather_object(np.zeros(3 << 20, np.uint8))",
        ("3 MiB", "PHALANX_MAX_OBJECT", "in parts"),
    ),
    # -- the life of a group
    Mistake("a second init", "px.init()", ("formed by init() at in_world.py", "close() it first")),
    Mistake("a group that was closed", "group.close()\ngroup.barrier()", ("this group was closed",)),
    Mistake("a group that is copied", "copy.deepcopy(world)", ("cannot be copied", "phalanx.init()")),
    Mistake("a group that is pickled", "pickle.dumps(world)", ("cannot be copied, pickled", "phalanx.init()")),
    Mistake("a result before it is there", "work = world.barrier(async_op=True)\nwork + 1", ("its wait() gives",)),
    Mistake("a shape before it is there", "world.all_reduce(np.ones(3), async_op=True).shape", ("its wait() gives",)),
    Mistake("a group in a forked child", "in_a_child(world.barrier)", ("was forked from rank", "phalanx.init")),
    # -- remote calls
    Mistake("a function nobody serves", 'agent.call(1 - rank, "no_such")', ("no_such", "add")),
    Mistake("a function instead of its name", "agent.call(1 - rank, print)", ("expected",)),
    Mistake("a lambda as an argument", 'agent.call(1 - rank, "add", lambda: 1, 2)', ("type function", "expected")),
    Mistake("too few arguments", 'agent.call(1 - rank, "add", 1)', ("add", "b")),
    Mistake("an argument of another type", 'agent.call(1 - rank, "add", "one", 2)', ("add", "int")),
    Mistake("a result that cannot be sent", 'agent.call(1 - rank, "give_file")', ("TextIOWrapper",)),
    Mistake("an error over there", 'agent.call(1 - rank, "divide")', ("ZeroDivisionError", "division by zero")),
    Mistake("a call to nobody", 'agent.call(5, "add", 1, 2)', ("rank 5", "0")),
]

HERE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "PHALANX_TOKEN": "abcdefgh"}

ALONE = [
    # First, because it is said once in a process.
    Mistake("a variable misspelt", "px.init().close()", ("PHALANX_TIMEOT", "PHALANX_TIMEOUT"), {"PHALANX_TIMEOT": "3"}),
    Mistake("RANK and nothing else", "px.init()", ("WORLD_SIZE is not set (found RANK=0)",), {"RANK": "0"}),
    Mistake("no RANK", "px.init(world_size=2)", ("RANK is not set", "rank=")),
    Mistake(
        "a rank too many", "px.init()", ("RANK=2", "valid ranks: 0 to 1"), {**HERE, "RANK": "2", "WORLD_SIZE": "2"}
    ),
    Mistake("a rank in words", "px.init()", ("RANK='one'", "whole number"), {**HERE, "RANK": "one", "WORLD_SIZE": "2"}),
    Mistake(
        "no port",
        "px.init()",
        ("MASTER_PORT is not set", "a place to meet"),
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"},
    ),
    Mistake(
        "a port that cannot be",
        "px.init()",
        ("MASTER_PORT='99999'", "1 to 65535"),
        {**HERE, "RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "99999"},
    ),
    Mistake(
        "a port in use",
        "busy = listener()\npx.init(rank=0, world_size=2, master=busy.address, token='abcdefgh', timeout=1)",
        ("Address already in use", "MASTER_PORT", "free there"),
    ),
    Mistake(
        "nobody at the master",
        "px.init(rank=1, world_size=2, master='127.0.0.1:1', token='abcdefgh', timeout=0.3)",
        ("rank 1 could not reach", "Connection refused", "does it run", "phalanx doctor"),
    ),
    Mistake(
        "a rank that was not started",
        "px.init(rank=0, world_size=2, master=nobody(), token='abcdefgh', timeout=3)",
        ("did not form within 3 s", "missing rank 1"),
    ),
    Mistake(
        "a master that nobody knows",
        "px.init(rank=1, world_size=2, master='no-such-host.invalid:29500', token='abcdefgh', timeout=0.3)",
        ("no-such-host.invalid", "cannot be resolved", "spelt right"),
    ),
    Mistake(
        "several hosts without a token",
        "px.init(rank=1, world_size=2, master='192.0.2.1:29500', timeout=0.3)",
        ("another host", "PHALANX_TOKEN", "secrets.token_hex"),
    ),
    Mistake("another token", "two_ranks(token=['first-token', 'other-token'])", ("token",)),
    Mistake("another world size", "two_ranks(world_size=[2, 3])", ("WORLD_SIZE must be the same on all",)),
    Mistake("the same rank twice", "two_ranks(rank=[0, 0])", ("rank 0",)),
    Mistake("a timeout in words", "px.init()", ("PHALANX_TIMEOUT='soon'", "seconds"), {"PHALANX_TIMEOUT": "soon"}),
    Mistake("a transport that is none", "px.init()", ("'auto' or 'tcp'",), {"PHALANX_TRANSPORT": "shm"}),
    Mistake("a backend of torch", 'px.init("gloo")', ("'mesh'", "leave it out")),
    Mistake("a master without a port", 'px.init(rank=0, world_size=2, master="node0")', ("expected host:port",)),
    Mistake("an argument misspelt", "px.init(timout=3)", ("did you mean 'timeout'?",)),
    Mistake("options as a dict", 'px.init(options={"heartbeat": 3})', ("expected phalanx.Options",)),
    Mistake(
        "no certificate",
        "px.init(rank=0, world_size=2, master=nobody(), token='abcdefgh', timeout=0.3)",
        ("TLS files cannot be used", "/no/cert.pem", "No such file"),
        {"PHALANX_TLS_CERT": "/no/cert.pem", "PHALANX_TLS_KEY": "/no/key.pem", "PHALANX_TLS_CA": "/no/ca.pem"},
    ),
    Mistake("TLS by half", "px.init()", ("PHALANX_TLS_KEY is not set",), {"PHALANX_TLS_CERT": "/no/cert.pem"}),
    Mistake(
        "a script without a launcher",
        "with px.init() as world:\n    world.send(np.ones(3), dst=1)",
        ("rank 1 is not in this group", "phalanx run -n 2"),
    ),
    Mistake("after the end", "with px.init() as world:\n    pass\nworld.barrier()", ("this group was closed",)),
    Mistake("no ranks", "px.launch(print, 0)", ("n=0", "1 or more")),
    Mistake("a script for launch", 'px.launch("train.py", 2)', ("phalanx run -n 4 script.py",)),
    Mistake(
        "a name of the function's for launch", "px.launch(print, 2, 3, n=4)", ("given 'n' twice", "it takes fn, n")
    ),
    Mistake("a call for launch", "px.launch(print(), 2)", ("itself, as in launch(train, 4)",)),
]

JOBS = [
    Mistake(
        "one rank raises",
        "import phalanx as px\nworld = px.init()\nif world.rank == 1:\n    1 / 0\nworld.barrier()",
        ("rank 1 failed", "script.py", "line 4", "ZeroDivisionError", "1 rank ended because of it"),
    ),
    Mistake(
        "one rank exits",
        "import sys\nimport phalanx as px\nworld = px.init()\nif world.rank == 1:\n    sys.exit(0)\nworld.barrier()",
        ("rank 1 failed: it left before the others were done", "exit code 0", "line 6"),
    ),
    Mistake(
        "one rank does not call init",
        'import os\nimport phalanx as px\nif os.environ["RANK"] == "0":\n    px.init()',
        ("rank 1 failed: its process ended before it joined the world", "line 4"),
    ),
    Mistake(
        "one rank is killed",
        "import os\nimport phalanx as px\nworld = px.init()\nif world.rank:\n    os.kill(os.getpid(), 9)\n"
        "world.barrier()",
        ("rank 1 failed: killed by SIGKILL", "out of memory?", "PeerLost", "line 6"),
    ),
    Mistake(
        "a deadline that is too short",
        "import time\nimport phalanx as px\nworld = px.init(timeout=2)\nif world.rank:\n    time.sleep(30)\n"
        "world.barrier()",
        ("not done within 2 s", "missing: 1", "script.py:5", "PHALANX_TIMEOUT"),
    ),
    Mistake("Python 2", 'print "hello"', ("SyntaxError", "line 1", " failed: exit code 1")),
    Mistake("a package that is not installed", "import no_such_package", ("named 'no_such_package'", "line 1")),
    Mistake(
        "a script that multiprocessing runs again",
        "import multiprocessing\nimport phalanx as px\nworld = px.init()\n"
        'child = multiprocessing.get_context("spawn").Process(target=print)\n'
        "child.start()\nchild.join()\nraise SystemExit(child.exitcode)",
        ('if __name__ == "__main__":', "line 3", "multiprocessing"),
    ),
]

COMMANDS = [
    Mistake("a command misspelt", "rnu -n 2 script.py", ("did you mean 'run'?",)),
    Mistake("a command of torch", "launch script.py", ("did you mean 'run'?",)),
    Mistake("no command", "script.py", ("phalanx run script.py",)),
    Mistake("a script that is not there", "run missing.py", ("no script 'missing.py'", "phalanx run -n 4 train.py")),
    Mistake("a script without its ending", "run script", ("phalanx run script.py",)),
    Mistake("no script", "run -n 2", ("Missing argument 'SCRIPT|MODULE'",)),
    Mistake("python before the script", "run -n 2 python script.py", ("phalanx run -n 4 train.py", "starts Python")),
    Mistake("a file as a module", "run -m script.py", ("-m script", "phalanx run script.py")),
    Mistake("a folder", "run folder", ("folder without a __main__.py",)),
    Mistake("no ranks", "run -n 0 script.py", ("expected a number from 1, or auto",)),
    Mistake("a number in words", "run -n four script.py", ("'four'", "expected a number")),
    Mistake("far too many ranks", "run -n 100000 script.py", ("too many", "4096")),
    Mistake("mpirun's number", "run -np 4 script.py", ("there is no option -np", "-n 4")),
    Mistake("options behind the script", "run script.py -n 4", ("stands behind the script", "before the script")),
    Mistake("an option of torchrun", "run --rdzv-id 7 script.py", ("leave it out",)),
    Mistake(
        "half of torchrun's master", "run --master_port 29500 script.py", ("needs --master-addr", "--master HOST:PORT")
    ),
    Mistake("a number of nodes that may change", "run --nnodes 1:4 script.py", ("give one number",)),
    Mistake("an option misspelt", "run --nproc-per-nod 2 script.py", ("Did you mean", "--nproc-per-node")),
    Mistake("several nodes, no master", "run --nnodes 2 script.py", ("--master HOST:PORT", "the same on every node")),
    Mistake("a master without a port", "run --nnodes 2 --master node0 script.py", ("expected host:port",)),
    Mistake(
        "several nodes, no token",
        "run --nnodes 2 --master node0:29500 script.py",
        ("PHALANX_TOKEN", "--token-file", "--new-token"),
    ),
    Mistake(
        "a node too many",
        "run --nnodes 2 --node-rank 2 --master node0:29500 script.py",
        ("--node-rank 2", "0 to 1"),
    ),
    Mistake("a variable without a value", "run --env LEVEL script.py", ("expected KEY=VALUE",)),
    Mistake("a token file that is not there", "run --token-file none script.py", ("--token-file none", "No such file")),
    Mistake("a hostfile that is not there", "run --hostfile none script.py", ("hostfile 'none'", "No such file")),
    Mistake("hosts that are no list", "run --hosts a,,b script.py", ("a:4,b:4",)),
    Mistake("the doctor's master", "doctor --master node0", ("--master 'node0'", "expected host:port")),
    Mistake("an opponent that is none", "bench --against glo", ("expected gloo",)),
]
