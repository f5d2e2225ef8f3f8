"""Files for Ray Serve. tests/ray_cluster.py validates them by Ray's schema and runs them."""

import ast

import yaml

from penstock.export.ray_files import RayListeners, write_app, write_config

MODEL = {"name": "m", "num_replicas": 2, "ray_actor_options": {"num_cpus": 0.5}}


def test_the_app_is_a_function_of_its_arguments() -> None:
    tree = ast.parse(write_app("Made by a test."))
    assert ast.get_docstring(tree, clean=True).startswith("Made by a test.")  # type: ignore[union-attr]
    (function,) = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert function.name == "app" and len(function.args.args) == 1


def test_the_config_says_where_proxies_listen_and_what_runs() -> None:
    args = {"repository": "/models", "versions": {"m": ["1"]}}
    text = write_config(args, [MODEL], RayListeners("0.0.0.0", 80, 81), ["a comment"])
    assert text.startswith("# a comment\n")
    found = yaml.safe_load(text)
    assert found["http_options"] == {"host": "0.0.0.0", "port": 80}
    assert found["grpc_options"]["port"] == 81
    assert found["proxy_location"] == "EveryNode"
    (application,) = found["applications"]
    assert application["import_path"] == "app:app"
    assert (application["route_prefix"], application["args"]) == ("/", args)
    assert application["deployments"] == [MODEL]


def test_without_a_port_there_is_no_grpc_and_without_listeners_no_proxy() -> None:
    without = yaml.safe_load(write_config({}, [], RayListeners("127.0.0.1", 80, None), []))
    assert "grpc_options" not in without
    servers = yaml.safe_load(write_config({}, [], None, []))
    assert servers["proxy_location"] == "Disabled"
    assert servers["applications"][0]["route_prefix"] is None
    assert "http_options" not in servers
