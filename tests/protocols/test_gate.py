"""Keys, scopes and hosts. Which route needs which scope is in test_route_table.py."""

from pathlib import Path

import pytest

from penstock.config import HttpLimits
from penstock.errors import ConfigError, InvalidRequest, NotAllowed, Unsupported
from penstock.processes.channel import socket_pair
from penstock.protocols.gate import Gate, digest_secret, secret_of
from penstock.protocols.h2_heads import make_head
from penstock.protocols.http_reader import MessageHead
from penstock.protocols.key_file import MAX_KEYS, MAX_NAME, KeyFile, read_keys
from penstock.protocols.line import MAX_SENT_BYTES
from penstock.protocols.route_table import INFERENCE
from penstock.protocols.shard_processes import NAMES_PER_FRAME
from penstock.protocols.v2_http import V2Http
from penstock.serving.quotas import Quota
from penstock.wire import frames

SECRET = "0123456789abcdef"
FILE = f"""
[[key]]
name = "team-a"
secret = "{SECRET}"
scopes = ["infer"]
[[key]]
name = "operator"
secret = "{SECRET[::-1]}"
scopes = ["metrics", "admin"]
"""


@pytest.fixture
def keys(tmp_path: Path):
    (tmp_path / "keys.toml").write_text(FILE)
    return read_keys(tmp_path / "keys.toml")


def test_without_keys_everything_is_allowed():
    Gate().check_scope("admin", {})


def test_health_is_open(keys):
    Gate(keys).check_scope("open", {})


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {b"authorization": b"Basic abc"},
        {b"authorization": b"Bearer "},
        {b"x-api-key": b"nobody"},
    ],
)
def test_no_key_or_an_unknown_one_is_refused(keys, headers):
    with pytest.raises(NotAllowed) as caught:
        Gate(keys).check_scope("infer", headers)
    assert caught.value.needs_key


@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
def test_a_key_opens_its_scopes_and_no_others(keys, header):
    value = f"Bearer {SECRET}" if header == "authorization" else SECRET
    headers = {header.encode(): value.encode()}
    gate = Gate(keys)
    gate.check_scope("infer", headers)
    for scope in ("metrics", "admin"):
        with pytest.raises(NotAllowed, match="This protocol is restricted") as caught:
            gate.check_scope(scope, headers)
        assert not caught.value.needs_key


@pytest.mark.parametrize("name", ["authorization", "x-api-key"])
def test_an_rpc_is_opened_by_the_same_keys(keys, name):
    gate = Gate(keys)
    value = f"Bearer {SECRET}" if name == "authorization" else SECRET
    headers = {"user-agent": "test", name: value}
    assert gate.admit_rpc(rpc("ModelInfer", headers)).scope == "infer"
    with pytest.raises(NotAllowed, match="has no scope 'admin'") as caught:
        gate.admit_rpc(rpc("RepositoryModelLoad", headers))
    assert not caught.value.needs_key
    for wrong in ({}, {name: "nobody"}, {name: value + "x"}, {name: "é"}):
        assert gate.admit_rpc(rpc("/grpc.health.v1.Health/Check", wrong)).scope == "open"
        with pytest.raises(NotAllowed) as caught:
            gate.admit_rpc(rpc("ModelInfer", wrong))
        assert caught.value.needs_key
    assert Gate().admit_rpc(rpc("RepositoryModelLoad", {})).handler == "load"


def rpc(method: str, headers: dict[str, str]) -> MessageHead:
    path = method if method.startswith("/") or not method else INFERENCE + method
    fields = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path.encode())]
    return make_head([*fields, *((name.encode(), text.encode()) for name, text in headers.items())])


@pytest.mark.parametrize("method", ["/unknown.Service/Method", "/", f"{INFERENCE}ModelInfer\n"])
def test_an_rpc_without_a_row_is_there_for_nobody(keys, method):
    for gate in (Gate(), Gate(keys)):
        with pytest.raises(Unsupported):
            gate.admit_rpc(rpc(method, {"x-api-key": SECRET}))


@pytest.mark.parametrize(
    ("host", "is_allowed"),
    [
        (b"localhost:8000", True),
        (b"LOCALHOST", True),
        (b"127.0.0.1", True),
        (b"[::1]:8000", True),
        (b"evil.example:8000", False),
        (b"localhost.evil.example", False),
        (b"127.0.0.1.evil.example:80", False),
        (b"[::2]", False),
        (b":8000", False),
        (b"", False),
        (b" ", False),
        (b"localhost:80.evil.com", False),
        (b"localhost:80:80", False),
        (b"localhost:", True),
        (b"localhost:x", False),
        (b"evil.com@localhost", False),
        (b"localhost@evil.com", False),
        (b"localhost/.evil.com", False),
        (b"localhost\x00", False),
        (b"[::1].evil.com", False),
        (b"[::1]:80.evil.com", False),
        (b"[::1", False),
        (b"::1", False),
    ],
)
def test_a_page_cannot_reach_the_server_under_another_name(host, is_allowed):
    gate = Gate(hosts=frozenset(("localhost", "127.0.0.1", "::1")))
    if is_allowed:
        gate.check_host({b"host": host})
    else:
        with pytest.raises(NotAllowed, match="--allow-host"):
            gate.check_host({b"host": host})


def a_change(**headers: str) -> MessageHead:
    named = {name.replace("_", "-").encode(): text.encode() for name, text in headers.items()}
    return MessageHead(b"POST", b"/v2/repository/models/m/unload", named)


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example", "host": "127.0.0.1:8000"},
        {"origin": "null", "host": "127.0.0.1:8000"},
        {"origin": "", "host": "127.0.0.1:8000"},
        # Another server of the same machine.
        {"origin": "http://127.0.0.1:3000", "host": "127.0.0.1:8000"},
        {"origin": "http://127.0.0.1:8000.evil.example", "host": "127.0.0.1:8000"},
        {"origin": "https://evil.example"},
    ],
)
def test_pages_of_other_origins_change_nothing(headers):
    with pytest.raises(NotAllowed, match="this server's pages only"):
        Gate().admit(a_change(**headers))
    assert not Gate().screen(a_change(**headers))


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "127.0.0.1:8000"},
        {"origin": "http://127.0.0.1:8000", "host": "127.0.0.1:8000"},
        {"origin": "https://models.example", "host": "Models.example"},
        {
            "origin": "https://models.example",
            "host": "10.0.0.3",
            "x_forwarded_host": "models.example",
        },
    ],
)
def test_own_pages_and_clients_that_are_no_browsers_may_change_models(headers):
    assert Gate().admit(a_change(**headers)).route.handler == "unload"


def test_with_keys_the_key_is_what_counts(keys):
    with pytest.raises(NotAllowed, match="needs an API key"):
        Gate(keys).admit(a_change(origin="https://evil.example", host="a"))
    known = {"origin": "https://console.example", "host": "a", "x_api_key": SECRET[::-1]}
    assert Gate(keys).admit(a_change(**known)).route.handler == "unload"


def test_pages_of_other_origins_may_ask_what_changes_nothing():
    head = MessageHead(b"GET", b"/v2/health/ready", {b"origin": b"https://evil.example"})
    assert Gate().admit(head).route.handler == "ready"


def test_a_message_of_http_1_0_may_have_no_host():
    Gate(hosts=frozenset(("localhost",))).check_host({})


@pytest.mark.parametrize(
    ("text", "complaints"),
    [
        ("", ["holds no"]),
        ("key = 3", ["holds no"]),
        ("key = [1]", ["holds no"]),
        ("x = " + "[" * 5000, ["nested too deeply"]),
        (f'[[key]]\nsecret = "{SECRET}"\nscopes = [["infer"]]\n', ["key[0].scopes"]),
        (f'[[key]]\nsecret = "{SECRET}"\nscopes = [{{a = 1}}]\n', ["key[0].scopes"]),
        ("[[key", ["keys.toml: Expected"]),
        (
            '[[key]]\nsecret = "short"\nscopes = ["infer"]\n'
            f'[[key]]\nsecret = "{SECRET}"\nscopes = ["root"]\n',
            [
                "key[0].secret",
                "key[1].scopes: expected a list of some of infer, metrics, shared_memory, admin; "
                "'root'",
            ],
        ),
        (
            "",
            ['expected for each key\n  [[key]]\n  secret = "at least 16 characters"\n  scopes = '],
        ),
        ('[[key]]\nsecret = "short"\nscopes = "infer"\n', ["key[0].secret", "key[0].scopes"]),
        (
            f'[[key]]\nsecret = "{SECRET}"\nscope = ["infer"]\n',
            ["key[0].scope: no such field; expected name, secret, scopes", "key[0].scopes"],
        ),
        (f"keys = 1\n{FILE}", ["keys.toml: keys: no such field"]),
        (f'{FILE}[[key]]\nname = 3\nsecret = "{SECRET}"\nscopes = ["admin"]\n', ["key[2].name"]),
        (
            f'{FILE}[[key]]\nsecret = "{SECRET}"\nscopes = ["admin"]\n',
            ["key[2].secret: the same as that of key[0]"],
        ),
    ],
)
def test_a_wrong_key_file_is_explained(tmp_path, text, complaints):
    (tmp_path / "keys.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_keys(tmp_path / "keys.toml")
    assert len(caught.value.problems) == len(complaints)
    for problem, complaint in zip(caught.value.problems, complaints, strict=True):
        assert complaint in problem
        assert SECRET not in problem


def test_so_many_keys_fit_the_frame_that_opens_a_shard(tmp_path):
    entries = [
        f'[[key]]\nsecret = "{SECRET}{number}"\nscopes = ["infer", "metrics", "admin"]\n'
        for number in range(MAX_KEYS + 1)
    ]
    path = tmp_path / "keys.toml"
    path.write_text("".join(entries[:-1]))
    keys = {digest: tuple(scopes) for digest, scopes in read_keys(path).scopes.items()}
    assert len(frames.encode(frames.SetKeys(keys))) <= MAX_SENT_BYTES
    frame = frames.OpenShard(frames.VERSION, 0, keys=keys)
    ours, theirs = socket_pair()
    with ours, theirs:
        ours.send(frames.encode(frame))
        data = theirs.recv(frames.MAX_FRAME_BYTES)
    assert frames.decode_to_shard(data) == frame
    names = dict.fromkeys(list(keys)[:NAMES_PER_FRAME], "\N{GRINNING FACE}" * MAX_NAME)
    assert len(frames.encode(frames.NameKeys(names))) <= MAX_SENT_BYTES
    path.write_text("".join(entries))
    with pytest.raises(ConfigError, match="4097 keys; at most 4096"):
        read_keys(path)


def test_logs_show_the_first_characters_of_a_long_name(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(FILE.replace("team-a", "a" * 3 * MAX_NAME))
    assert read_keys(path).names[digest_secret(SECRET.encode())] == "a" * MAX_NAME


def test_a_key_file_is_read_again_when_it_has_changed(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    file = KeyFile(path)
    assert file.read().scopes[digest_secret(SECRET.encode())] == {"infer"}
    assert file.read_if_changed() is None
    path.write_text(FILE.replace('["infer"]', '["metrics"]'))
    changed = file.read_if_changed()
    assert changed is not None and changed.scopes[digest_secret(SECRET.encode())] == {"metrics"}
    assert file.read_if_changed() is None


@pytest.mark.parametrize("broken", ["[[key", "", None])
def test_a_change_that_cannot_be_used_is_told_once(tmp_path, broken):
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    file = KeyFile(path)
    file.read()
    if broken is None:
        path.unlink()
    else:
        path.write_text(broken)
    with pytest.raises(ConfigError):
        file.read_if_changed()
    assert file.read_if_changed() is None
    (tmp_path / "new").write_text(FILE)
    (tmp_path / "new").rename(path)
    assert file.read_if_changed() is not None


def test_callers_have_names_for_logs(keys):
    gate = Gate(keys)
    assert gate.caller_name({b"x-api-key": SECRET.encode()}) == "team-a"
    assert gate.caller_name({}) == "anonymous"
    unknown = gate.caller_name({b"x-api-key": b"some other secret"})
    assert unknown == f"key {digest_secret(b'some other secret').hex()[:8]}"
    assert Gate().caller_name({b"x-api-key": b"anything"}) == "anonymous"


def test_a_missing_key_file_is_explained(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_keys(tmp_path / "none.toml")


def test_callers_are_told_apart_by_their_key_and_only_where_keys_are_needed(tmp_path: Path):
    (tmp_path / "keys.toml").write_text(FILE)
    gate = Gate(read_keys(tmp_path / "keys.toml"))
    bearer = {b"authorization": b"Bearer " + SECRET.encode()}
    plain = {b"x-api-key": SECRET.encode()}
    other = {b"x-api-key": SECRET[::-1].encode()}
    assert gate.caller(bearer) == gate.caller(plain) != gate.caller(other)
    assert SECRET.encode() not in gate.caller(plain)
    assert gate.caller({}) == Gate().caller(bearer) == b""


def test_keys_may_have_quotas(tmp_path: Path):
    path = tmp_path / "keys.toml"
    first, second = FILE.split("[[key]]")[1:]
    limited = (
        f"[[key]]{first}requests_per_s = 2.5\ntokens_per_s = 7\nqueue_share = 1\n[[key]]{second}"
    )
    path.write_text(limited)
    keys = read_keys(path)
    gate = Gate(keys)
    digest = gate.caller({b"x-api-key": SECRET.encode()})
    assert keys.quotas == {digest: Quota(2.5, 7, 1)}


@pytest.mark.parametrize("name", ["requests_per_s", "tokens_per_s", "queue_share"])
@pytest.mark.parametrize("value", ["0", "-1", "true", '"1"', "nan", "inf", "1e300"])
def test_quotas_that_make_no_sense_are_refused(tmp_path: Path, name: str, value: str):
    path = tmp_path / "keys.toml"
    path.write_text(f'[[key]]\nsecret = "{SECRET}"\nscopes = ["infer"]\n{name} = {value}\n')
    with pytest.raises(ConfigError, match=rf"key\[0\]\.{name}: expected a number above 0"):
        read_keys(path)


@pytest.mark.parametrize("name", [b"authorization", b"x-api-key"])
def test_a_key_that_is_given_twice_is_refused_and_counts_as_none(name: bytes) -> None:
    headers = {name: b"Bearer one\nBearer two"}
    with pytest.raises(InvalidRequest, match=f"the header {name.decode()} is given twice"):
        Gate().check_keys(headers)
    assert secret_of(headers) is None
    assert secret_of({b"x-api-key": b"another", **headers}) is None
    Gate().check_keys({b"authorization": b"Bearer one", b"x-api-key": b"two"})


class NoDoor:
    """Heads are all that is looked at."""

    def infer(self) -> None: ...

    def refused(self) -> None: ...


@pytest.mark.parametrize(
    ("method", "path", "headers", "passes"),
    [
        (b"POST", b"/v2/models/m/infer", {b"x-api-key": SECRET.encode()}, True),
        (b"POST", b"/v2/models/m/infer", {}, False),
        (b"POST", b"/v2/models/m/infer", {b"x-api-key": b"another secret!!"}, False),
        (b"POST", b"/v2/nothing", {b"x-api-key": SECRET.encode()}, False),
        (b"DELETE", b"/v2/models/m/infer", {b"x-api-key": SECRET.encode()}, False),
        (b"POST", b"/v2/models/m/infer", {b"x-api-key": SECRET.encode(), b"host": b"evil"}, False),
    ],
)
def test_a_long_body_is_read_only_for_a_message_that_may_pass(
    tmp_path: Path, method: bytes, path: bytes, headers: dict[bytes, bytes], passes: bool
):
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[[key]]\nsecret = "{SECRET}"\nscopes = ["infer"]\n')
    gate = Gate(read_keys(keys), frozenset({"localhost"}))
    v2 = V2Http(NoDoor(), HttpLimits(), gate)
    head = MessageHead(method, path, {b"host": b"localhost", **headers})
    assert v2.screen(head) is passes
