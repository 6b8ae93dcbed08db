"""The configuration: from arguments, a launcher's variables, and the user's. The only reader of `os.environ`.

Start with `detect` (who am I?) and `Options` (everything that can be tuned). `variables.py` lists what is read.
"""

from __future__ import annotations

from .detect import Launch, detect, four_variables, started_as
from .environment import (
    as_gloo,
    backend_of_choice,
    cache_dir,
    debug,
    inherited,
    is_watched,
    last_words_folder,
    log_level,
    memory_dir,
    min_size,
    nccl_shares_gpus,
    nearest_variable,
    pure,
    runtime_dir,
    snapshot,
    torch_hooks_wanted,
    tuning_of_choice,
    unknown_variables,
)
from .options import Options, TlsOptions, options_of
from .reader import adopt
from .timeouts import Timeouts, operation_timeout, timeouts
from .variables import VARIABLES, Variable

__all__ = [
    "VARIABLES",
    "Launch",
    "Options",
    "Timeouts",
    "TlsOptions",
    "Variable",
    "adopt",
    "as_gloo",
    "backend_of_choice",
    "cache_dir",
    "debug",
    "detect",
    "four_variables",
    "inherited",
    "is_watched",
    "last_words_folder",
    "log_level",
    "memory_dir",
    "min_size",
    "nccl_shares_gpus",
    "nearest_variable",
    "operation_timeout",
    "options_of",
    "pure",
    "runtime_dir",
    "snapshot",
    "started_as",
    "timeouts",
    "torch_hooks_wanted",
    "tuning_of_choice",
    "unknown_variables",
]
