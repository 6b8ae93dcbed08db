"""torch's own tests of a backend (its `testing._internal.distributed.distributed_test`), on any backend and device."""
