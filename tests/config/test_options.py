"""Options: defaults, variables, precedence, and what is refused."""

from __future__ import annotations

import ast
import copy
import dataclasses
import inspect
import math
import pickle
from typing import Any

import pytest

from phalanx.config import Options, TlsOptions
from phalanx.config import options as module
from phalanx.errors import ConfigError, MissingVariable

TLS_ENV = {"PHALANX_TLS_CERT": "/c.pem", "PHALANX_TLS_KEY": "/k.pem", "PHALANX_TLS_CA": "/a.pem"}
TLS = TlsOptions(certificate="/c.pem", key="/k.pem", ca="/a.pem")

# field, variable, its text, the value it stands for (never the default)
FROM_ENV: list[tuple[str, str, str, object]] = [
    ("interface", "PHALANX_INTERFACE", "eth0", "eth0"),
    ("interface", "PHALANX_INTERFACE", "fe80::1", "fe80::1"),
    ("port_range", "PHALANX_PORT_RANGE", "20000-20100", (20000, 20100)),
    ("port_range", "PHALANX_PORT_RANGE", " 20000 - 20100 ", (20000, 20100)),
    ("port_range", "PHALANX_PORT_RANGE", "29600", (29600, 29600)),
    ("heartbeat", "PHALANX_HEARTBEAT", "0.25", 0.25),
    ("heartbeat_timeout", "PHALANX_HEARTBEAT_TIMEOUT", "7", 7.0),
    ("handshake_timeout", "PHALANX_HANDSHAKE_TIMEOUT", "2.5", 2.5),
    ("max_pending_handshakes", "PHALANX_MAX_PENDING_HANDSHAKES", "9", 9),
    ("max_message", "PHALANX_MAX_MESSAGE", "4096", 4096),
    ("max_message", "PHALANX_MAX_MESSAGE", "32GiB", 32 << 30),
    ("max_message", "PHALANX_MAX_MESSAGE", "3 t", 3 << 40),
    ("max_object", "PHALANX_MAX_OBJECT", "512 MiB", 512 << 20),
    ("max_object", "PHALANX_MAX_OBJECT", "64k", 64 << 10),
    ("transport", "PHALANX_TRANSPORT", "tcp", "tcp"),
    ("transport", "PHALANX_TRANSPORT", "TCP", "tcp"),
    ("segment_heap", "PHALANX_SEGMENT_HEAP", "2GiB", 2 << 30),
    ("mpi_check", "PHALANX_MPI_CHECK", "0", False),
    ("algorithm", "PHALANX_ALGORITHM", "all_reduce=ring, broadcast=tree", "all_reduce=ring, broadcast=tree"),
]


def test_the_defaults() -> None:
    assert dataclasses.asdict(Options()) == {
        "interface": None,
        "port_range": None,
        "heartbeat": 1.0,
        "heartbeat_timeout": 5.0,
        "handshake_timeout": 5.0,
        "max_pending_handshakes": 128,
        "max_message": 16 << 30,
        "max_object": 1 << 30,
        "transport": "auto",
        "segment_heap": 1 << 30,
        "algorithm": None,
        "mpi_check": True,
        "tls": None,
    }
    assert Options.from_env({}) == Options()


@pytest.mark.parametrize(("field", "variable", "text", "value"), FROM_ENV)
def test_argument_over_environment_over_default(field: str, variable: str, text: str, value: object) -> None:
    env = {variable: text}
    default = getattr(Options(), field)
    assert value != default
    assert getattr(Options.from_env(env), field) == value
    assert getattr(Options.from_env({variable: "  "}), field) == default
    # Also a default wins over the environment when it was spelt out.
    assert getattr(Options.from_env(env, **{field: default}), field) == default
    assert getattr(Options(**{field: default}).resolve(env), field) == default
    assert Options(max_object=5).resolve(env).max_object == 5


def test_every_field_has_a_variable_and_a_docstring() -> None:
    covered = {field for field, *_ in FROM_ENV} | {"tls"}
    names = {field.name for field in dataclasses.fields(Options)}
    assert covered == names
    for cls in (Options, TlsOptions):
        body = ast.parse(inspect.getsource(cls)).body[0]
        assert isinstance(body, ast.ClassDef)
        documented = {
            above.target.id
            for above, below in zip(body.body, body.body[1:], strict=False)
            if isinstance(above, ast.AnnAssign)
            and isinstance(above.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        }
        assert documented == {field.name for field in dataclasses.fields(cls)}


def test_port_zero_is_any() -> None:
    assert Options.from_env({"PHALANX_PORT_RANGE": "0"}).port_range is None


def test_tls_from_its_three_variables() -> None:
    assert Options.from_env(TLS_ENV).tls == TLS
    assert Options(heartbeat=2).resolve(TLS_ENV).tls == TLS, "an unrelated option must not switch encryption off"
    assert Options.from_env(TLS_ENV, tls=None).tls is None


@pytest.mark.parametrize("missing", list(TLS_ENV))
def test_tls_with_a_variable_missing(missing: str) -> None:
    with pytest.raises(MissingVariable) as caught:
        Options.from_env({name: value for name, value in TLS_ENV.items() if name != missing})
    assert caught.value.variable == missing
    for name in TLS_ENV:
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("interface", ""),
        ("interface", "eth 0"),
        ("interface", 3),
        ("port_range", (0, 0)),
        ("port_range", (5, 4)),
        ("port_range", (1, 65536)),
        ("port_range", (1,)),
        ("port_range", [1, 2]),
        ("port_range", ("1", "2")),
        ("port_range", (True, 2)),
        ("port_range", 5),
        ("heartbeat", 0),
        ("heartbeat", -1.0),
        ("heartbeat", math.nan),
        ("heartbeat", math.inf),
        ("heartbeat", "1"),
        ("heartbeat", None),
        ("heartbeat", True),
        ("heartbeat_timeout", 0.0),
        ("heartbeat_timeout", 1e9),
        ("handshake_timeout", 0),
        ("max_pending_handshakes", 0),
        ("max_pending_handshakes", 1.5),
        ("max_pending_handshakes", 1 << 20),
        ("max_message", 0),
        ("max_message", 1 << 60),
        ("max_message", 1e9),
        ("max_object", -1),
        ("algorithm", "rings"),
        ("algorithm", "ring,halving_doubling"),
        ("algorithm", "all_reduce=rings"),
        ("algorithm", "send=ring"),
        ("algorithm", "all_reduce=ring,all_reduce=doubling"),
        ("algorithm", {"all_reduce": "ring"}),
        ("tls", "cert.pem"),
        ("tls", {"certificate": "a"}),
    ],
)
def test_a_bad_field_is_named_with_its_value_and_what_is_expected(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        Options(**{field: value})
    assert str(caught.value).startswith(f"{field}={value!r} is not valid (expected ")


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("PHALANX_INTERFACE", "a b"),
        ("PHALANX_PORT_RANGE", "20000:20100"),
        ("PHALANX_PORT_RANGE", "20100-20000"),
        ("PHALANX_PORT_RANGE", "1-70000"),
        ("PHALANX_PORT_RANGE", "-5"),
        ("PHALANX_PORT_RANGE", "0-5"),
        ("PHALANX_HEARTBEAT", "fast"),
        ("PHALANX_HEARTBEAT", "0"),
        ("PHALANX_HEARTBEAT", "nan"),
        ("PHALANX_HEARTBEAT_TIMEOUT", "-1"),
        ("PHALANX_HANDSHAKE_TIMEOUT", "inf"),
        ("PHALANX_MAX_PENDING_HANDSHAKES", "many"),
        ("PHALANX_MAX_PENDING_HANDSHAKES", "0"),
        ("PHALANX_MAX_MESSAGE", "-1"),
        ("PHALANX_MAX_MESSAGE", "0"),
        ("PHALANX_MAX_MESSAGE", "1.5GiB"),
        ("PHALANX_MAX_MESSAGE", "9" * 18 + "TiB"),
        ("PHALANX_MAX_OBJECT", "1 GiB please"),
        ("PHALANX_TRANSPORT", "shm"),
        ("PHALANX_SEGMENT_HEAP", "0"),
    ],
)
def test_a_bad_variable_is_named_with_its_value_and_what_is_expected(variable: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Options.from_env({variable: text})
    assert str(caught.value).startswith(f"{variable}={text!r} is not valid (expected ")


@pytest.mark.parametrize("values", [{"heartbeat": 5.0}, {"heartbeat_timeout": 1.0}, {"heartbeat_timeout": 0.5}])
def test_the_heartbeat_must_be_shorter_than_its_timeout(values: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"heartbeat=.* is not below heartbeat_timeout="):
        Options(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["certificate", "key", "ca"])
@pytest.mark.parametrize("value", ["", "  ", None, 3])
def test_tls_paths_are_checked(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"tls.{field}="):
        TlsOptions(**{"certificate": "c", "key": "k", "ca": "a", field: value})


def test_options_are_frozen_keyword_only_and_known_by_name() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().heartbeat = 2.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        Options("eth0")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="hartbeat"):
        Options.from_env({}, hartbeat=2.0)
    assert "heartbeat" in inspect.signature(Options).parameters


def test_copies_keep_what_was_given() -> None:
    env = {"PHALANX_HEARTBEAT": "0.5", "PHALANX_MAX_MESSAGE": "1MiB"}
    options = Options(heartbeat=1.0)
    expected = Options(heartbeat=1.0, max_message=1 << 20)
    for same in (options, copy.copy(options), copy.deepcopy(options), pickle.loads(pickle.dumps(options))):
        assert same == options
        assert same.resolve(env) == expected
        assert same.resolve(env).resolve({"PHALANX_MAX_MESSAGE": "2MiB"}) == expected, "resolved once is resolved"
    assert hash(options) == hash(Options())


def test_every_rule_belongs_to_a_field() -> None:
    assert set(module._RULES) | {"tls"} == {field.name for field in dataclasses.fields(Options)}
