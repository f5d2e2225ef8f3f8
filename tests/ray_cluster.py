"""Models on a real Ray cluster of two nodes on this machine: one line of report per check.

    python tests/ray_cluster.py               # all, about ten minutes on two cores
    python tests/ray_cluster.py --only node   # checks with this in their title

`make verify-ray` runs it in an environment with Ray. Each check is a process of its own, with a
cluster of its own; what it wrote is in `.bench/ray-checks/`. Exit code 1 if one failed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray_load
from ray_load import OpenLoad, wait_until

ROOT = Path(__file__).resolve().parents[1]
LOGS = ROOT / ".bench" / "ray-checks"
EXAMPLES = ROOT / "examples"
LIMIT_S = 400
NUM_LINES = 40
# How lines with figures begin; Ray writes its own, indented too.
FIGURE = "  > "
LIGHT = {"ray_actor_options": {"num_cpus": 0.1}}
PACE = "/v2/models/pace/infer"
STORE_BYTES = 100 << 20


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


class TwoNodes:
    """A head and a worker node, each with processes of its own; Serve's proxy is on the head."""

    def __init__(self, num_nodes: int = 2, num_cpus: int = 8) -> None:
        import ray
        from ray import serve
        from ray.cluster_utils import Cluster

        import penstock.ray

        self.folder = Path(tempfile.mkdtemp(prefix="pr-", dir="/tmp"))
        # Ray notes the address of its newest cluster there, wherever the cluster's own folder is.
        Path("/tmp/ray").mkdir(exist_ok=True)
        self._node = {"num_cpus": num_cpus, "object_store_memory": STORE_BYTES}
        head = {**self._node, "include_dashboard": False, "temp_dir": str(self.folder / "ray")}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.workers = [self._cluster.add_node(**self._node) for _ in range(num_nodes - 1)]
        self._cluster.wait_for_nodes()
        ray.init(address=self._cluster.address, log_to_driver=False, logging_level="WARNING")
        self.port, self.grpc_port = free_port(), free_port()
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": "127.0.0.1", "port": self.port},
            grpc_options=penstock.ray.grpc_options(self.grpc_port),
        )
        self.repository = self.folder / "models"
        self.repository.mkdir()

    def __enter__(self) -> TwoNodes:
        return self

    def __exit__(self, *_: object) -> None:
        import ray
        from ray import serve

        with contextlib.suppress(Exception):
            serve.shutdown()
        ray.shutdown()
        self._cluster.shutdown()
        shutil.rmtree(self.folder, ignore_errors=True)

    def add_node(self) -> None:
        self.workers.append(self._cluster.add_node(**self._node))

    def kill_worker_node(self) -> int:
        """Kill the raylet of a worker node with SIGKILL; return its process id."""
        node = self.workers.pop(0)
        pid = next(
            info.process.pid
            for kind, infos in node.all_processes.items()
            if kind == "raylet"
            for info in infos
        )
        os.kill(pid, signal.SIGKILL)
        return int(pid)

    def run(self, **options: Any) -> Any:
        from ray import serve

        import penstock.ray

        names = options.pop("light", ())
        given = options.pop("deployments", {})
        ingress = {**LIGHT, **given.get("penstock_ingress", {})}
        deployments = {"penstock_ingress": ingress}
        deployments |= {name: {**LIGHT, **given.get(name, {})} for name in names}
        app = penstock.ray.app(self.repository, deployments=deployments, **options)
        return serve.run(app)

    def replicas(self, deployment: str) -> dict[str, str]:
        """The nodes of the replicas that run, by their names."""
        import ray

        controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
        details = ray.get(controller.get_serve_instance_details.remote())
        found = details["applications"]["default"]["deployments"][deployment]["replicas"]
        return {each["replica_id"]: each["node_id"] for each in found if each["state"] == "RUNNING"}

    def ask(self, path: str, body: Any = None, timeout_s: float = 30.0) -> tuple[int, bytes]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data=data)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()


def check_node_killed(retries: int) -> Iterator[str]:
    """Kill a node under load. With retries nothing is lost; without, what ran there."""
    with TwoNodes() as cluster:
        # About two requests run on each node at any time, and one node can take all.
        ray_load.write_pace(cluster.repository, "pace", 0.4, instances=4)
        deployments = {"pace": {"num_replicas": 2}, "penstock_ingress": {"num_replicas": 2}}
        cluster.run(light=["pace"], deployments=deployments, retries=retries)
        here = head_node()
        for name in deployments:
            nodes = set(cluster.replicas(name).values())
            assert len(nodes) == 2, f"both replicas of {name} are on one node"
        with OpenLoad(cluster.port, PACE, 9) as load:
            time.sleep(5)
            killed_s = load.elapsed_s()
            cluster.kill_worker_node()
            took_s = wait_until(
                lambda: list(cluster.replicas("pace").values()) == [here, here],
                "two replicas on the node that is left",
                120,
            )
            time.sleep(5)
        results = load.tally.results
        assert all(each.outcome == "200" for each in results if each.due_s < killed_s - 1)
        slow_ms = max(1e3 * each.latency_s for each in results)
        yield f"retries {retries}: {load.tally}"
        yield f"second replica again after {took_s:.1f} s; slowest request {slow_ms:.0f} ms"
        if retries:
            assert load.tally.num_lost == 0, load.tally
        else:
            assert 0 < load.tally.num_lost < 20, load.tally


def check_replicas_killed() -> Iterator[str]:
    """Kill replicas, one at a time, while requests run on them: calls are repeated elsewhere."""
    with TwoNodes() as cluster:
        ray_load.write_pace(cluster.repository, "pace", 0.4, instances=4)
        cluster.run(light=["pace"], deployments={"pace": {"num_replicas": 2}})
        with OpenLoad(cluster.port, PACE, 9) as load:
            for _ in range(3):
                time.sleep(3)
                first, *_ = before = set(cluster.replicas("pace"))
                kill_replica("pace", first)
                wait_until(
                    lambda before=before: (
                        len(set(cluster.replicas("pace")) - before) == 1
                        and len(cluster.replicas("pace")) == 2
                    ),
                    "a new replica",
                    90,
                )
            time.sleep(3)
        num_slow = sum(each.latency_s > 0.6 for each in load.tally.results)
        yield f"3 replicas killed: {load.tally}; {num_slow} took longer than 0.6 s"
        assert load.tally.num_lost == 0, load.tally
        assert num_slow, "no request ran on a replica that was killed"


def head_node() -> str:
    import ray

    node: str = ray.get_runtime_context().get_node_id()
    return node


def check_scaling() -> Iterator[str]:
    """1 -> 4 -> 1 replicas with the load, without a lost request."""
    with TwoNodes() as cluster:
        ray_load.write_pace(cluster.repository, "pace", 0.05)
        scaling = {
            "min_replicas": 1,
            "max_replicas": 4,
            "target_ongoing_requests": 1,
            "upscale_delay_s": 1,
            "downscale_delay_s": 5,
            "look_back_period_s": 2,
            "metrics_interval_s": 1,
        }
        cluster.run(light=["pace"], deployments={"pace": {"autoscaling_config": scaling}})
        assert len(cluster.replicas("pace")) == 1
        with OpenLoad(cluster.port, PACE, 5) as load:
            time.sleep(3)
            assert len(cluster.replicas("pace")) == 1
            load.rate = 60
            up_s = wait_until(lambda: len(cluster.replicas("pace")) == 4, "4 replicas", 90)
            num_nodes = len(set(cluster.replicas("pace").values()))
            time.sleep(5)
            load.rate = 3
            down_s = wait_until(lambda: len(cluster.replicas("pace")) == 1, "1 replica", 120)
            time.sleep(3)
        yield f"1 -> 4 in {up_s:.1f} s on {num_nodes} nodes, 4 -> 1 in {down_s:.1f} s"
        yield str(load.tally)
        assert load.tally.num_lost == 0, load.tally


def check_rolling_update() -> Iterator[str]:
    """Promote a version and run the application again, under load: nothing is lost."""
    with TwoNodes() as cluster:
        ray_load.write_pace(cluster.repository, "pace", 0.01, versions=2)
        deployments = {"pace": {"num_replicas": 2}}
        cluster.run(light=["pace"], deployments=deployments)
        with OpenLoad(cluster.port, PACE, 20) as load:
            time.sleep(4)
            command = [sys.executable, "-m", "penstock", "repo", "promote"]
            command += [str(cluster.repository), "pace", "2", "--force", "made by hand"]
            subprocess.run(command, check=True)
            began_s = load.elapsed_s()
            cluster.run(light=["pace"], deployments=deployments)
            ended_s = load.elapsed_s()
            time.sleep(4)
        early = {each.version for each in load.tally.results if each.due_s < began_s}
        late = {each.version for each in load.tally.results if each.due_s > ended_s + 0.5}
        yield f"versions before {early}, after {late}; the update took {ended_s - began_s:.1f} s"
        yield str(load.tally)
        assert (early, late) == ({"1"}, {"2"})
        assert load.tally.num_lost == 0, load.tally


def check_pinned_version() -> Iterator[str]:
    """A replica that is replaced after a promotion still serves what was deployed."""
    with TwoNodes(1) as cluster:
        ray_load.write_pace(cluster.repository, "pace", 0.0, versions=2)
        cluster.run(light=["pace"])
        ray_load.choose(cluster.repository, "pace", 2)
        (first,) = cluster.replicas("pace")
        kill_replica("pace", first)
        body = json.loads(ray_load.BODY)
        wait_until(lambda: set(cluster.replicas("pace")) not in ({first}, set()), "a new replica")
        status, answer = cluster.ask(PACE, body)
        assert (status, json.loads(answer)["model_version"]) == (200, "1")
        yield "version 1 after the replica was replaced, although 2 is promoted"


def kill_replica(deployment: str, name: str) -> None:
    """Kill the process of one replica."""
    import ray

    actor = ray.get_actor(f"SERVE_REPLICA::default#{deployment}#{name}", namespace="serve")
    ray.kill(actor, no_restart=False)


def check_protocols() -> Iterator[str]:
    """v2 over HTTP and gRPC, with the clients that people use; figures of all replicas."""
    import numpy as np
    import tritonclient.grpc as grpc_client
    import tritonclient.http as http_client

    with TwoNodes() as cluster:
        shutil.copytree(EXAMPLES / "repository", cluster.repository, dirs_exist_ok=True)
        names = ["digits", "identity", "simple", "text_length"]
        cluster.run(light=names, deployments={"identity": {"num_replicas": 2}})
        array = np.arange(16, dtype=np.float32).reshape(1, 16)
        num_calls = 0
        for module, port in ((http_client, cluster.port), (grpc_client, cluster.grpc_port)):
            client = module.InferenceServerClient(f"127.0.0.1:{port}")
            assert client.is_server_live() and client.is_server_ready()
            assert client.is_model_ready("digits") and not client.is_model_ready("nothing")
            given = module.InferInput("INPUT0", [1, 16], "FP32")
            given.set_data_from_numpy(array)
            for _ in range(20):
                assert (client.infer("identity", [given]).as_numpy("OUTPUT0") == array).all()
                num_calls += 1
            try:
                client.infer("nothing", [given])
                raise AssertionError("a model that is not there answered")
            except Exception as error:
                assert "unknown model" in str(error), error
            client.close()
        yield f"{num_calls} inferences with tritonclient over HTTP and gRPC"
        with grpc_client.InferenceServerClient(f"127.0.0.1:{cluster.grpc_port}") as client:
            answers: list[Any] = []
            client.start_stream(lambda result, error: answers.append((result, error)))
            for number in range(30):
                given = grpc_client.InferInput("INPUT0", [1, 16], "FP32")
                given.set_data_from_numpy(array + number)
                name = "identity" if number != 7 else "nothing"
                client.async_stream_infer(name, [given], request_id=str(number))
            wait_until(lambda: len(answers) == 30, "30 answers of a stream")
            client.stop_stream()
            values = [
                None if error else result.as_numpy("OUTPUT0")[0, 0] for result, error in answers
            ]
            expected = [None if number == 7 else float(number) for number in range(30)]
            assert values == expected, values
            counts = client.get_inference_statistics("identity", as_json=True)["model_stats"]
            assert int(counts[0]["inference_count"]) == num_calls + 29, counts
            yield f"30 answers of a stream in order; {num_calls + 29} requests counted"
        text = cluster.ask("/metrics")[1].decode()
        found = re.findall(
            r'nv_inference_request_success\{model="identity".*replica="(\w+)"\} (\d+)', text
        )
        assert len(found) == 2 and sum(int(count) for _, count in found) == num_calls + 29, found
        yield f"metrics of replicas: {dict(found)}"


def check_texts() -> Iterator[str]:
    """OpenAI's client over Ray; equal starts of prompts meet on one replica, loads stay even."""
    import openai
    from text_server import NAME, write_model

    with TwoNodes() as cluster:
        write_model(cluster.repository, {"penstock.kv_cache_bytes": str(8 << 20)}, max_length=1024)
        deployments = {NAME: {"num_replicas": 2}}
        cluster.run(light=[NAME], deployments=deployments)
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{cluster.port}/v1", api_key="none")
        assert [each.id for each in client.models.list()] == [NAME]
        settings = {"model": NAME, "max_tokens": 8, "temperature": 0}
        whole = client.completions.create(prompt="one two three", **settings).choices[0].text
        parts = client.completions.create(prompt="one two three", stream=True, **settings)
        streamed = [part.choices[0].text for part in parts]
        assert "".join(streamed) == whole and len(streamed) > 2, streamed
        yield f"a completion whole and in {len(streamed)} parts are the same"
        counts = text_counts(cluster)
        spread = Counter[str]()
        for number in range(12):
            start = f"subject {number} " * 40
            used: Counter[str] = Counter()
            for turn in range(4):
                client.completions.create(prompt=f"{start} question {turn}", **settings)
                now = text_counts(cluster)
                used.update(name for name in now if now[name] > counts.get(name, 0))
                counts = now
            assert len(used) == 1, f"the prompts of start {number} went to {used}"
            spread.update(used)
        yield f"48 prompts of 12 starts: each start on one replica; by replica {dict(spread)}"
        assert len(spread) == 2 and min(spread.values()) >= 4, spread
        leave_stream(client, settings)
        began = text_counts(cluster)
        threads = [
            threading.Thread(
                target=client.completions.create,
                kwargs={**settings, "prompt": "the same start " * 40 + str(n), "max_tokens": 60},
            )
            for n in range(24)
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        now = text_counts(cluster)
        shares = {name: now[name] - began.get(name, 0) for name in now}
        yield f"24 prompts of one start at a time: by replica {shares}"
        assert min(shares.values()) >= 4, "one start overloads one replica"


def leave_stream(client: Any, settings: dict[str, Any]) -> None:
    """Leave in the middle of a stream; the next request is answered at once."""
    stream = client.completions.create(
        prompt="for ever",
        stream=True,
        **{**settings, "max_tokens": 900},
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    stream.close()


def text_counts(cluster: TwoNodes) -> dict[str, int]:
    text = cluster.ask("/metrics")[1].decode()
    pattern = r'nv_inference_request_success\{.*replica="(\w+)"\} (\d+)'
    return {name: int(count) for name, count in re.findall(pattern, text)}


def check_handles() -> Iterator[str]:
    """Other deployments call a model with arrays, as `penstock.load` is called."""
    import numpy as np
    from ray import serve

    with TwoNodes(1) as cluster:
        shutil.copytree(EXAMPLES / "repository" / "digits", cluster.repository / "digits")
        cluster.run(light=["digits"])
        handle = serve.get_deployment_handle("digits", "default")
        images = np.random.default_rng(0).random((8, 1, 8, 8), dtype=np.float32)
        found = handle.infer.remote(images).result(timeout_s=30)
        import penstock

        with penstock.load(cluster.repository / "digits") as model:
            expected = model.infer(images)
        assert np.array_equal(found["logits"], expected["logits"])
        yield "8 rows through a handle are bit for bit those of penstock.load"


def check_node_servers() -> Iterator[str]:
    """ingress="penstock": a server on each node, placed and replaced by Ray."""
    from ray import serve

    import penstock.ray

    with TwoNodes() as cluster:
        ray_load.write_pace(cluster.repository, "pace", 0.0)
        options: dict[str, Any] = {"ingress": "penstock", "http_port": 0, "grpc_port": 0}
        app = penstock.ray.app(cluster.repository, ingress_replicas=2, **options)
        handle = serve.run(app, route_prefix=None)
        found = handle.broadcast("address").results(timeout_s=30)
        urls = [each["url"] for each in found]
        assert len(set(urls)) == 2, found
        body = ray_load.BODY.encode()
        for url in urls:
            with urllib.request.urlopen(url + PACE, body, 10) as answer:
                assert json.loads(answer.read())["model_version"] == "1"
        assert len(set(cluster.replicas("penstock_server").values())) == 2
        yield f"2 servers on 2 nodes answer: {', '.join(urls)}"
        os.kill(int(found[0]["pid"]), signal.SIGKILL)

        def is_replaced() -> bool:
            with contextlib.suppress(Exception):
                now = handle.broadcast("address").results(timeout_s=10)
                return len({each["pid"] for each in now} - {found[0]["pid"]}) == 2
            return False

        took_s = wait_until(is_replaced, "a new server", 90)
        yield f"a server that was killed is replaced after {took_s:.1f} s"


def check_export() -> Iterator[str]:
    """`penstock export ray`: what it writes is valid for Ray, and runs."""
    import yaml
    from ray.serve.schema import ServeDeploySchema

    with TwoNodes(1) as cluster:
        shutil.copytree(EXAMPLES / "repository" / "digits", cluster.repository / "digits")
        out = cluster.folder / "out"
        command = [sys.executable, "-m", "penstock", "export", "ray", str(cluster.repository)]
        command += ["--out", str(out), "--http-port", str(cluster.port), "--max-replicas", "2"]
        subprocess.run(command, check=True)
        written = yaml.safe_load((out / "serve_config.yaml").read_text())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            schema = ServeDeploySchema.model_validate(written)
        (application,) = schema.applications
        assert {each.name for each in application.deployments} == {"penstock_ingress", "digits"}
        yield f"serve_config.yaml is valid: {[each.name for each in application.deployments]}"
        deploy(out, written)
        image = json.loads((EXAMPLES / "digit.json").read_text())
        status, answer = cluster.ask("/v2/models/digits/infer", image)
        assert status == 200 and "three" in answer.decode(), answer
        yield "the application that it describes answers"


def deploy(out: Path, written: dict[str, Any]) -> None:
    """Deploy a config file, as `serve run` does."""
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    sys.path.insert(0, str(out))
    application = written["applications"][0]
    application.setdefault("runtime_env", {})["env_vars"] = {"PYTHONPATH": f"{out}:{ROOT}"}
    client = _get_global_client()
    client.deploy_apps(ServeDeploySchema.model_validate(written), _blocking=True)


def check_fastapi() -> Iterator[str]:
    """The example with FastAPI under uvicorn: mounted, drained, no process left."""
    import psutil

    port = free_port()
    app = ["--app-dir", str(EXAMPLES / "fastapi_app"), "app:app"]
    command = [sys.executable, "-m", "uvicorn", "--port", str(port), "--log-level", "warning"]
    server = subprocess.Popen([*command, *app])
    try:
        url = f"http://127.0.0.1:{port}"

        def is_ready() -> bool:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(url + "/models/v2/health/ready") as answer,
            ):
                return answer.status == 200
            return False

        took_s = wait_until(is_ready, "the application", 60)
        body = (EXAMPLES / "digit.json").read_bytes()
        with urllib.request.urlopen(f"{url}/models/v2/models/digits/infer", body) as answer:
            assert b"three" in answer.read()
        children = psutil.Process(server.pid).children(recursive=True)
        yield f"ready after {took_s:.1f} s with {len(children)} processes"
    finally:
        server.terminate()
        assert server.wait(30) in (0, -signal.SIGTERM)
    assert not [each for each in children if each.is_running()]
    yield "stopped, and no process is left"


CHECKS: dict[str, Callable[[], Iterator[str]]] = {
    "node killed under load": lambda: check_node_killed(2),
    "node killed, without retries": lambda: check_node_killed(0),
    "replicas killed under load": check_replicas_killed,
    "scale 1 -> 4 -> 1": check_scaling,
    "rolling update": check_rolling_update,
    "pinned version": check_pinned_version,
    "v2 over HTTP and gRPC": check_protocols,
    "texts and prefixes": check_texts,
    "handles": check_handles,
    "servers on nodes": check_node_servers,
    "export": check_export,
    "FastAPI": check_fastapi,
}


def run_one(title: str) -> None:
    """Run a check in this process, and print its figures."""
    for line in CHECKS[title]():
        print(f"{FIGURE}{line}", flush=True)


def run_apart(title: str) -> bool:
    """Run a check in a process of its own; return whether it passed."""
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"{re.sub('[^a-z0-9]+', '-', title.lower()).strip('-')}.txt"
    began = time.monotonic()
    command = [sys.executable, __file__, "--run", title]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
            file.write(f"\nended after {LIMIT_S} s\n")
    lines = log.read_text(errors="replace").splitlines()
    state = "ok" if code == 0 else "FAILED"
    print(f"{state:7} {title} ({time.monotonic() - began:.0f} s)")
    for line in lines if code == 0 else lines[-NUM_LINES:]:
        if code or line.startswith(FIGURE):
            print(f"        {line.removeprefix(FIGURE).strip()}")
    sys.stdout.flush()
    return code == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--only", default="", help="run the checks with this in their title")
    parser.add_argument("--run", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if importlib.util.find_spec("ray.serve") is None:
        print("Ray Serve is not installed here; make verify-ray has an environment with it")
        return 1
    if options.run:
        run_one(options.run)
        return 0
    titles = [title for title in CHECKS if options.only.lower() in title.lower()]
    if not titles:
        print(f"no check has '{options.only}' in its title; there: {', '.join(CHECKS)}")
        return 1
    return 0 if all([run_apart(title) for title in titles]) else 1


if __name__ == "__main__":
    sys.exit(main())
