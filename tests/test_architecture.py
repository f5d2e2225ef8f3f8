"""The shape of the code: which folder may import which, what is pure, what is never used, and how
large it may be.

`python tests/test_architecture.py` writes tests/shape.toml, what there is today.
"""

import ast
import re
import subprocess
import sys
import tomllib
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "penstock"
TESTS = ROOT / "tests"
SOURCES = sorted(PACKAGE.rglob("*.py"))
TEST_SOURCES = sorted(TESTS.rglob("*.py"))

# A module imports only from its own line and the lines before it.
ORDER = [
    {"errors", "types", "sampling_params", "slo", "config", "units", "system"},
    {"wire", "kernels"},
    {"processes"},
    {"repository", "backends"},
    {"serving"},
    {"llm"},
    {"data"},
    {"benchmark"},
    {"optimizer", "profiling"},
    {"operate"},
    {"export"},
    {"report"},
    {"protocols"},
    {"dashboard"},
    {"server", "api", "ray"},
    {"cli"},
    {"__main__"},
]
PURE = [
    "backends/gpu_memory.py",
    "optimizer/columns.py",
    "data/cycling.py",
    "data/fitting.py",
    "data/lengths.py",
    "benchmark/targets/http_messages.py",
    "benchmark/targets/v2_requests.py",
    "protocols/route.py",
    "protocols/route_table.py",
    "dashboard/example_calls.py",
    "llm/blocks.py",
    "llm/pace.py",
    "sampling_params.py",
    "llm/scheduler.py",
    "llm/sequence.py",
    "llm/stops.py",
    "llm/table_rows.py",
    "llm/ttft_admission.py",
    "slo.py",
    "wire/*.py",
    "benchmark/agreement.py",
    "benchmark/exchange.py",
    "benchmark/ci_gate.py",
    "benchmark/messages.py",
    "benchmark/plan.py",
    "benchmark/findings.py",
    "benchmark/pacer.py",
    "benchmark/recorder.py",
    "benchmark/comparison.py",
    "benchmark/headline.py",
    "benchmark/summary.py",
    "benchmark/search.py",
    "benchmark/stats.py",
    "benchmark/steadiness.py",
    "benchmark/verdicts.py",
    "benchmark/targets/shared.py",
    "optimizer/first_line.py",
    "optimizer/wording.py",
    "export/ray_files.py",
    "export/ray_plan.py",
    "ray/cluster_messages.py",
    "ray/prefixes.py",
    "ray/replica_figures.py",
    "report/before_after.py",
    "report/bench_figures.py",
    "report/figures.py",
    "report/marks.py",
    "report/optimize_figures.py",
    "report/plots.py",
    "report/scales.py",
    "report/profile_figures.py",
    "report/reproduce.py",
    "report/tried.py",
    "units.py",
    "export/autoscaling.py",
    "export/helm.py",
    "export/kserve.py",
    "export/kubernetes.py",
    "export/names.py",
    "export/pod.py",
    "export/settings.py",
    "export/sizing.py",
    "export/yaml_text.py",
    "operate/rollout_checks.py",
    "operate/rollout_judge.py",
    "operate/rollout_measures.py",
    "operate/rollout_promise.py",
    "operate/rollout_state.py",
    "operate/sequential.py",
    "optimizer/accuracy.py",
    "optimizer/llm/likelihoods.py",
    "optimizer/audit.py",
    "optimizer/binomial.py",
    "optimizer/budget.py",
    "optimizer/extremes.py",
    "optimizer/findings.py",
    "optimizer/goals.py",
    "optimizer/numerics.py",
    "optimizer/outcomes.py",
    "optimizer/phases.py",
    "optimizer/progress.py",
    "optimizer/fallback.py",
    "optimizer/shapes.py",
    "optimizer/simulate.py",
    "optimizer/time_plan.py",
    "operate/burn_rate.py",
    "operate/machine_shares.py",
    "operate/sliding_sums.py",
    "operate/capacity.py",
    "operate/scaling_replay.py",
    "profiling/gpu_timeline.py",
    "profiling/roofline.py",
    "profiling/work.py",
    "serving/answer_order.py",
    "serving/answer_store.py",
    "serving/rate_pool.py",
    "serving/remote_answers.py",
    "serving/arrival_rates.py",
    "serving/scaling.py",
    "serving/file_watch.py",
    "serving/sustained_rate.py",
    "serving/batch_times.py",
    "serving/batcher.py",
    "system/environment.py",
    "serving/explain.py",
    "serving/batches.py",
    "serving/claims.py",
    "serving/divergence.py",
    "serving/drift.py",
    "serving/elsewhere.py",
    "serving/input_statistics.py",
    "serving/shares.py",
    "serving/lanes.py",
    "serving/padding.py",
    "serving/paces.py",
    "serving/placement.py",
    "serving/quarantine.py",
    "serving/quotas.py",
    "serving/leases.py",
    "processes/restarts.py",
    "serving/plan.py",
    "serving/slo_batcher.py",
    "serving/split_counts.py",
]
# A shard's parts of a model, which run in another process than its supervisor.
KNOW_NO_PROCESS = [
    "serving/admission.py",
    "serving/cold_start.py",
    "serving/core_link.py",
    "serving/dispatcher.py",
    "serving/quarantine.py",
    "serving/readiness.py",
    "serving/replies.py",
    "serving/request_memory.py",
    "serving/request_queue.py",
    "serving/worker_place.py",
]
IMPURE_MODULES = {
    "asyncio",
    "multiprocessing",
    "selectors",
    "signal",
    "socket",
    "subprocess",
    "threading",
    "time",
    "uvloop",
}
# What unpickles, or runs text as code.
UNSAFE_MODULES = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}
UNSAFE_KEYWORDS = {("allow_pickle", True), ("weights_only", False), ("shell", True)}
MAX_FUNCTION_LINES = 80

# Modules without a test file of their own, and why.
WITHOUT_OWN_TEST = {
    "__init__.py": "tests/test_public_api.py",
    "__main__.py": "tests/test_cli.py starts it",
    "api/__init__.py": "empty",
    "api/asgi_options.py": "tests/api/test_options.py",
    "api/bench.py": "tests/api/test_results.py",
    "api/bench_options.py": "tests/api/test_options.py",
    "api/bench_plan.py": "tests/test_bench_cli.py makes plans, tests/api/test_results.py too",
    "api/capacity.py": "tests/operate/test_capacity.py plans through it",
    "api/capacity_options.py": "tests/api/test_options.py",
    "serving/ensemble_members.py": "tests/serving/test_ensemble.py reloads and unloads members",
    "serving/ensemble_run.py": "tests/serving/test_ensemble.py passes requests through steps",
    "serving/ensemble_steps.py": "tests/serving/test_ensemble.py explains steps",
    "serving/latency_scrape.py": "tests/e2e/test_triton_metrics.py reads what it writes",
    "api/client_grpc.py": "tests/api/test_client.py asks over it",
    "api/client_http.py": "tests/api/test_client.py asks over it",
    "api/embedded.py": "tests/api/test_asgi.py starts and stops it",
    "api/endpoint.py": "tests/api/test_client.py parses URLs",
    "api/explain.py": "tests/api/test_explain_errors.py and test_results.py",
    "api/export_options.py": "tests/api/test_options.py",
    "api/inspect.py": "tests/api/test_results.py",
    "api/keywords.py": "values only; tests/api/test_options.py compares them",
    "api/optimize.py": "tests/api/test_results.py and tests/test_optimize_cli.py",
    "api/optimize_options.py": "tests/api/test_options.py",
    "api/predictions.py": "tests/api/test_loaded.py predicts through it",
    "api/profile.py": "tests/api/test_results.py and tests/test_profile_cli.py",
    "api/profile_options.py": "tests/api/test_options.py",
    "api/ray_options.py": "tests/api/test_options.py",
    "api/repo.py": "tests/test_repo_cli.py calls each function by its command",
    "api/serve_options.py": "tests/api/test_options.py",
    "api/server_http.py": "tests/api/test_explain_errors.py meets each error",
    "api/version_sources.py": "tests/test_repo_cli.py asks folders and servers",
    "api/server_process.py": "tests/api/test_server_handle.py starts it",
    "api/serving.py": "tests/api/test_server_handle.py and tests/test_cli.py run it",
    "api/shown.py": "tests/api/test_results.py",
    "api/local_text.py": "tests/api/test_loaded.py",
    "backends/__init__.py": "tests/suites/backend.py is its contract",
    "backends/finished.py": "values only; tests/suites/backend.py waits for them",
    "backends/python_reader.py": "tests/backends/test_python_signature.py starts it",
    "repository/python_model.py": "values only; tests/backends/test_python_signature.py reads them",
    "backends/onnx_import/__init__.py": "empty",
    "backends/onnx_import/elementwise.py": "tests/backends/onnx_import/test_conformance.py",
    "backends/onnx_import/images.py": "tests/backends/onnx_import/test_conformance.py",
    "backends/onnx_import/indexing.py": "tests/backends/onnx_import/test_conformance.py",
    "backends/onnx_import/layers.py": "tests/backends/onnx_import/test_conformance.py",
    "backends/onnx_import/losses.py": "tests/backends/onnx_import/test_conformance.py",
    "backends/onnx_import/matrices.py": "tests/backends/onnx_import/test_conformance.py",
    "backends/onnx_import/modules.py": "tests/backends/onnx_import/test_importer.py looks at them",
    "backends/onnx_import/quantised.py": "tests/backends/onnx_import/test_conformance.py",
    "backends/onnx_import/recurrent.py": "tests/backends/onnx_import/test_conformance.py",
    "backends/onnx_import/reductions.py": "tests/backends/onnx_import/test_conformance.py",
    "backends/onnx_import/shapes.py": "tests/backends/onnx_import/test_conformance.py",
    "backends/onnx_import/signal.py": "tests/backends/onnx_import/test_conformance.py",
    "backends/onnx_import/values.py": "values only",
    "backends/onnx_import/weights.py": "tests/backends/onnx_import/test_importer.py reads files",
    "backends/onnx_import/folding.py": "tests/backends/test_torch_onnx.py and test_patterns.py",
    "backends/checks.py": "the tests of the backends that use it",
    "benchmark/__init__.py": "empty",
    "benchmark/generator.py": "tests/benchmark/test_crew.py starts it",
    "benchmark/level.py": "tests/benchmark/test_run.py measures through it",
    "benchmark/plan.py": "values only; tests/test_bench_cli.py and benchmark/test_run.py make them",
    "benchmark/results.py": "values only; tests/benchmark/test_run_files.py keeps them",
    "data/__init__.py": "tests/data/test_datasets.py and others open it",
    "data/samples.py": "values only",
    "benchmark/targets/__init__.py": "tests/suites/target.py and benchmark/targets/test_kinds.py",
    "cli/__init__.py": "tests/test_cli.py",
    "cli/bench.py": "tests/test_bench_cli.py",
    "cli/capacity.py": "tests/test_cli.py",
    "cli/commands.py": "tests/test_commands.py",
    "cli/completion.py": "tests/test_cli.py",
    "cli/explain.py": "tests/test_cli.py and tests/e2e/test_watch.py",
    "cli/export.py": "tests/test_export_cli.py",
    "cli/export_ray.py": "tests/ray/test_export_files.py types it",
    "cli/export_triton.py": "tests/api/test_export_triton.py and test_import_triton.py type them",
    "export/triton_python.py": "tests/api/test_export_triton.py runs what it writes",
    "cli/inspect.py": "tests/test_cli.py",
    "cli/optimize.py": "tests/test_optimize_cli.py",
    "cli/options.py": "tests/test_cli.py reads the help",
    "cli/outputs.py": "the tests of the commands that write",
    "cli/profile.py": "tests/test_profile_cli.py",
    "cli/repo.py": "tests/test_repo_cli.py",
    "cli/report.py": "tests/test_report_cli.py and tests/test_bench_cli.py",
    "cli/serve.py": "tests/test_cli.py",
    "operate/__init__.py": "empty",
    "serving/version_loader.py": "tests/serving/test_catalog.py loads by it",
    "export/__init__.py": "empty",
    "export/settings.py": "values only; tests/export/made_settings.py makes them",
    "config.py": "values only; tests/repository/test_repository_layout.py resolves them",
    "system/exit_codes.py": "names only; tests/test_commands.py meets each of them",
    "kernels/cudnn_int8.py": "tests/gpu/test_int8_cuda.py runs its plans",
    "kernels/__init__.py": "names only",
    "ray/__init__.py": "tests/ray/test_application.py",
    "ray/cluster_models.py": "tests/ray/test_cluster_router.py asks all of them",
    "ray/handles.py": "needs Ray; tests/ray_cluster.py kills replicas behind them",
    "ray/ingress.py": "tests/ray/test_cluster_router.py and test_inference_rpcs.py ask it",
    "ray/prefix_router.py": "needs Ray; tests/ray_cluster.py routes prompts by it",
    "repository/__init__.py": "empty",
    "repository/signature.py": "values only; tests/repository/test_pbtxt.py reads them",
    "system/__init__.py": "empty",
    "system/memory.py": "tests/system/test_machine_memory.py, whose name was taken",
    "processes/__init__.py": "empty",
    "processes/start.py": "tests/serving/test_supervisor.py starts processes by it",
    "processes/restarted.py": "tests/llm/test_open_generations.py and test_renderer.py",
    "processes/run_tool.py": "tests/processes/test_tool.py starts it",
    "repository/layout.py": "tests/repository/test_repository_layout.py, whose name was taken",
    "llm/__init__.py": "empty",
    "llm/chat_template.py": "tests/llm/test_text.py renders templates",
    "llm/engine_loading.py": "tests/llm/test_engine_main.py and test_loading.py load through it",
    "llm/engine_supervisor.py": "tests/llm/test_open_generations.py",
    "llm/generation.py": "values only; tests/llm/test_open_generations.py makes them",
    "llm/json_files.py": "tests/llm/test_checkpoint.py and test_text.py read through it",
    "llm/logits.py": "tests/llm/test_sampling.py samples through it",
    "llm/messages.py": "values only; tests/llm/test_engine_main.py sends them",
    "sampling_params.py": "values only; tests/llm/test_sampling.py samples with them",
    "llm/sequence.py": "tests/llm/test_scheduler.py",
    "llm/text_scrape.py": "tests/llm/test_text_metrics.py scrapes it",
    "llm/token_reader.py": "tests/llm/test_token_bytes.py reads three kinds of tokenizers by it",
    "llm/models/__init__.py": "empty",
    "llm/models/fp8.py": "tests/llm/models/test_linear.py compares it",
    "llm/models/family.py": "tests/llm/models/test_families.py reads configurations by it",
    "llm/models/feed.py": "tests/llm/models/test_decoder.py compares it with the same by hand",
    "llm/models/geglu.py": "tests/llm/models/test_against_transformers.py compares it",
    "llm/models/gemma.py": "tests/llm/models/test_against_transformers.py compares it",
    "llm/models/gpt2.py": "tests/llm/models/test_against_transformers.py compares it",
    "llm/models/layer.py": "tests/llm/models/test_decoder.py makes layers by it",
    "llm/models/mixtures.py": "tests/llm/models/test_against_transformers.py compares them",
    "llm/models/norms.py": "tests/kernels/test_decoding.py compares it",
    "llm/models/opt.py": "tests/llm/models/test_against_transformers.py compares it",
    "llm/models/swiglu.py": "tests/llm/models/test_decoder.py compares it with the same by hand",
    "llm/models/weights.py": "tests/llm/models/test_decoder.py makes decoders of them",
    "protocols/forwarding.py": "tests/protocols/test_shard_main.py leaves messages to the core",
    "protocols/grpc_server.py": "tests/protocols/test_v2_grpc.py and test_grpc_call.py call it",
    "protocols/h2_data.py": "tests/protocols/test_h2.py sends its frames",
    "protocols/h2_heads.py": "tests/protocols/test_h2.py sends heads",
    "protocols/h2_sender.py": "tests/protocols/test_h2.py opens and closes its windows",
    "protocols/h2_stream.py": "tests/protocols/test_h2.py",
    "protocols/infer_grpc.py": "tests/protocols/test_v2_grpc.py",
    "protocols/listener.py": "tests/protocols/test_http.py and test_tls.py connect to it",
    "protocols/http_errors.py": "tests/protocols/test_v2_http.py meets each of them",
    "protocols/http_reader.py": "tests/protocols/test_http.py reads messages with it",
    "protocols/http_server.py": "tests/protocols/test_http.py connects to it",
    "protocols/infer_http.py": "tests/protocols/test_v2_http.py gets answers by it",
    "protocols/infer_bodies.py": "tests/protocols/test_v2_http.py sends compressed bodies",
    "protocols/choice_logprobs.py": "tests/protocols/test_openai_http.py asks for logprobs",
    "protocols/whole_answers.py": "tests/protocols/test_openai_http.py and test_generate_http.py",
    "protocols/tokenize_http.py": "tests/protocols/test_openai_http.py asks for tokens",
    "protocols/key_file.py": "tests/protocols/test_gate.py reads files with it",
    "protocols/reflection_grpc.py": "tests/e2e/test_access_flags.py asks it as grpcurl does",
    "protocols/route.py": "tests/protocols/test_route_table.py finds every row",
    "wire/live.py": "values only; tests/dashboard/test_live_sampler.py decodes them",
    "wire/statuses.py": "tests/protocols/test_v2_http.py and test_v2_grpc.py meet each of them",
    "serving/served.py": "a protocol; whatever the catalog has is one",
    "repository/onnx_file.py": "tests/repository/test_repository_layout.py reads files through it",
    "optimizer/__init__.py": "empty",
    "optimizer/candidates.py": "values only; tests/optimizer/test_optimizer_search.py makes them",
    "optimizer/llm/__init__.py": "empty",
    "optimizer/search.py": "tests/optimizer/test_optimizer_search.py, whose name was taken",
    "optimizer/answer_source.py": "tests/optimizer/test_accuracy_gate.py asks it",
    "optimizer/builder.py": "tests/optimizer/test_gpu_sessions.py and test_optimizer_run.py",
    "optimizer/data_checks.py": "tests/optimizer/test_accuracy_gate.py checks data",
    "optimizer/evaluator.py": "tests/optimizer/test_accuracy_gate.py and test_gpu_sessions.py",
    "optimizer/inspector.py": "tests/optimizer/test_gpu_sessions.py and test_optimizer_run.py",
    "optimizer/measurements.py": "tests/optimizer/test_gpu_sessions.py and test_served.py",
    "optimizer/model_run.py": "tests/optimizer/test_optimizer_run.py makes them",
    "optimizer/tensor_run.py": "tests/optimizer/test_optimizer_run.py runs it",
    "optimizer/run_context.py": "values; tests/optimizer/made_evaluators.py makes them",
    "optimizer/attempts.py": "tests/optimizer/test_optimizer_search.py tries every outcome",
    "optimizer/findings.py": "tests/optimizer/test_optimizer_search.py and test_conclusion.py",
    "optimizer/serving_rounds.py": "tests/optimizer/test_optimizer_search.py serves by it",
    "optimizer/run.py": "tests/optimizer/test_optimizer_run.py, whose name was taken",
    "optimizer/machine.py": "values only; tests/optimizer/test_this_machine.py reads them",
    "optimizer/plan.py": "values only; tests/optimizer/test_plan_file.py makes them",
    "optimizer/results.py": "values only; tests/optimizer/test_optimization_files.py",
    "optimizer/passes/__init__.py": "tests/optimizer/passes/ build through it",
    "optimizer/progress.py": "tests/optimizer/test_optimizer_search.py reads it",
    "report/__init__.py": "empty",
    "report/bench.py": "tests/report/test_bench_page.py, whose name was taken",
    "optimizer/torch_export.py": "tests/optimizer/passes/test_onnx_export.py and "
    "test_torch_compile.py export through it",
    "optimizer/trial_child.py": "tests/optimizer/test_trials.py starts it",
    "profiling/__init__.py": "empty",
    "profiling/child.py": "tests/profiling/test_profiler.py starts it",
    "profiling/results.py": "values only",
    "protocols/__init__.py": "empty",
    "server.py": "tests/e2e/test_server.py and tests/test_cli.py start it",
    "serving/__init__.py": "empty",
    "serving/lifecycle.py": "values only; tests/protocols/test_v2_http.py drains with it",
    "serving/control.py": "tests/protocols/test_shard_processes.py and e2e/test_control.py ask it",
    "serving/paces.py": "tests/serving/test_slo_batcher.py aims through it",
    "serving/lanes.py": "tests/serving/test_batcher.py and test_slo_batcher.py queue through it",
    "operate/off_loop.py": "tests/operate/test_version_actions.py works off the loop",
    "serving/admission.py": "tests/serving/test_model.py submits through it",
    "serving/context.py": "values only; penstock/serving/model.py makes them",
    "serving/dispatcher.py": "tests/serving/test_model.py runs batches through it",
    "serving/redis_client.py": "tests/e2e/test_redis_cache.py asks a real Redis",
    "serving/shard.py": "tests/serving/test_shards.py has several",
    "serving/core_link.py": "protocols; tests/serving/test_model_host.py has both ends",
    "serving/worker_place.py": "values only; tests/serving/test_model.py looks at them",
    "serving/readiness.py": "tests/serving/test_model.py loads, crashes and hangs workers",
    "serving/replies.py": "tests/serving/test_model.py reads the answers",
    "serving/request_memory.py": "tests/serving/test_model.py counts what is held",
    "serving/request_queue.py": "tests/serving/test_model.py queues through it",
    "serving/instance.py": "values only; tests/serving/test_supervisor.py looks at them",
    "serving/spares.py": "tests/serving/test_model.py kills workers until there are spares",
    "serving/shard_link.py": "tests/serving/test_worker.py maps the memory of shards",
    "serving/worker_link.py": "tests/serving/test_model.py runs batches through it",
    "serving/model_table.py": "tests/serving/test_catalog.py finds models",
    "serving/executor.py": "tests/serving/test_model.py runs batches through it",
    "serving/worker_load.py": "tests/serving/test_model.py and test_warmups.py load through it",
    "serving/worker_spill.py": "tests/serving/test_model.py sends tensors of any size",
    "serving/scrape.py": "tests/serving/test_metrics.py reads its text",
    "dashboard/__init__.py": "empty",
    "wire/__init__.py": "empty",
    "wire/openai_forms.py": "tests/wire/test_openai_v1.py encodes answers with it",
    "wire/openai_logprobs.py": "tests/wire/test_openai_v1.py encodes logprobs",
    "wire/openai_prompts.py": "tests/wire/test_openai_v1.py and test_openai_fields.py read by it",
    "wire/v2_request.py": "tests/wire/test_v2.py reads every request by it",
    "wire/v2_templates.py": "tests/wire/test_v2.py decodes and encodes twice, first without them",
    "wire/version_rows.py": "types only; tests/operate/ and tests/repository/test_history.py",
    "wire/documented.py": "types only; tests/e2e/test_openapi_conformance.py compares answers",
}


def short(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree(path)))


def walk_at_run_time(module: ast.Module) -> Iterator[ast.stmt]:
    """Every statement, those of functions included, except what only a type checker reads."""
    waiting: list[ast.AST] = [module]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            waiting += node.orelse
            continue
        if isinstance(node, ast.stmt):
            yield node
        for field in ("body", "orelse", "handlers", "finalbody", "cases"):
            waiting += getattr(node, field, ())


@cache
def imports(path: Path) -> frozenset[str]:
    """Dotted names imported at run time; `from a import b` gives both `a` and `a.b`."""
    found: set[str] = set()
    for node in walk_at_run_time(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{short(path)}:{node.lineno} is a relative import"
            assert node.module is not None
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found)


BY_NAME = {module_name(source): source for source in SOURCES}


@cache
def own_imports(path: Path) -> frozenset[Path]:
    """Files of the package that this one imports."""
    return frozenset(BY_NAME[name] for name in imports(path) if name in BY_NAME)


def rank(path: Path) -> int:
    first = path.relative_to(PACKAGE).with_suffix("").parts[0]
    ranks = [index for index, names in enumerate(ORDER) if first in names]
    assert ranks, f"{short(path)}: where in ORDER does '{first}' belong?"
    return ranks[0]


def test_imports_go_one_way() -> None:
    """`penstock/__init__.py` is the face: all may read its version, it loads others when called."""
    face = PACKAGE / "__init__.py"
    wrong = [
        f"{short(path)} imports {short(other)}"
        for path in SOURCES
        if path != face
        for other in own_imports(path) - {face}
        if rank(other) > rank(path)
    ]
    assert wrong == []


def test_no_module_imports_itself_through_others() -> None:
    face = PACKAGE / "__init__.py"
    left = {path: set(own_imports(path)) - {face, path} for path in SOURCES if path != face}
    while free := [path for path, others in left.items() if not others]:
        for path in free:
            del left[path]
        for others in left.values():
            others.difference_update(free)
    assert sorted(map(short, left)) == []


def needs(path: Path) -> set[Path]:
    """Files that are imported with this one, itself included."""
    seen, waiting = set(), [path]
    while waiting:
        current = waiting.pop()
        seen.add(current)
        waiting.extend(own_imports(current) - seen - {PACKAGE / "__init__.py"})
    return seen


def test_what_decides_knows_no_clock_thread_or_socket() -> None:
    used = {
        f"{short(path)} gets {name} from {short(source)}"
        for pattern in PURE
        for path in PACKAGE.glob(pattern)
        for source in needs(path)
        for name in {full.split(".")[0] for full in imports(source)} & IMPURE_MODULES
    }
    assert used == set()


def test_requests_are_admitted_placed_and_answered_without_processes() -> None:
    used = {
        f"{name} gets {short(source)}"
        for name in KNOW_NO_PROCESS
        for source in needs(PACKAGE / name)
        if source.parent.name == "processes" or source.name in ("supervisor.py", "instance.py")
        if short(source) != "processes/channel.py"  # Sockets; the core makes them.
    }
    assert used == set()


@cache
def added_by_importing(module: str) -> set[str]:
    """Top-level modules outside the standard library that an import brings."""
    script = (
        "import sys; before = set(sys.modules); import " + module + "; "
        "names = {name.split('.')[0] for name in set(sys.modules) - before}; "
        "print(*sorted(names - sys.stdlib_module_names))"
    )
    command = [sys.executable, "-c", script]
    output = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(output.stdout.split())


@pytest.mark.parametrize(
    "module",
    [
        "penstock",
        "penstock.api.client",
        "penstock.types",
        "penstock.config",
        "penstock.repository.layout",
        "penstock.wire.v2",
        "penstock.wire.frames",
        "penstock.serving.worker",
        "penstock.data",
    ],
)
def test_importing_needs_only_numpy_and_msgspec(module: str) -> None:
    assert added_by_importing(module) <= {"penstock"} | added_by_importing("numpy, msgspec")


def test_importing_the_package_itself_is_cheap() -> None:
    assert added_by_importing("penstock") == {"penstock"}


def is_unsafe(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in UNSAFE_CALLS
    if isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant):
        return (node.arg, node.value.value) in UNSAFE_KEYWORDS
    return False


def test_nothing_is_unpickled_or_run_from_text() -> None:
    used = [
        f"{short(path)} imports {name}"
        for path in SOURCES
        for name in {name.split(".")[0] for name in imports(path)} & UNSAFE_MODULES
    ]
    used += [
        f"{short(path)}: {ast.unparse(node)}"
        for path in SOURCES
        for node in nodes(path)
        if is_unsafe(node)
    ]
    assert used == []


def test_modules_open_with_what_they_own() -> None:
    silent = [
        short(path)
        for path in SOURCES
        if path.name != "__main__.py" and not ast.get_docstring(tree(path))
    ]
    assert silent == []


def test_functions_fit_a_screen() -> None:
    long = {
        f"{short(path)}: {node.name}": node.end_lineno - node.lineno + 1
        for path in SOURCES
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= MAX_FUNCTION_LINES
    }
    assert long == {}


def test_tests_mirror_the_tree() -> None:
    missing = []
    for path in SOURCES:
        relative = path.relative_to(PACKAGE)
        test = TESTS / relative.parent / f"test_{relative.stem}.py"
        if short(path) not in WITHOUT_OWN_TEST and not test.is_file():
            missing.append(test.relative_to(ROOT).as_posix())
    assert missing == []


def test_exceptions_to_the_mirror_are_modules_that_exist() -> None:
    assert WITHOUT_OWN_TEST.keys() - {short(path) for path in SOURCES} == set()


def test_names_of_test_files_are_unique() -> None:
    names = [path.name for path in TEST_SOURCES if path.name.startswith("test_")]
    assert sorted(names) == sorted(set(names))


# Most files have none, and are not parsed.
MAY_BE_PRIVATE = re.compile(
    r"(?<!self)(?<!cls)(?<!os)(?<!sys)\._\w|\bimport\b.*\b_\w|^\s+_\w+,?$", re.M
)


def private_names(path: Path) -> Iterator[str]:
    text = path.read_text()
    if not MAY_BE_PRIVATE.search(text):
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("penstock"):
            yield from (alias.name for alias in node.names if is_private(alias.name))
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            owner = ast.unparse(node.value)
            if owner not in {"self", "cls", "os", "sys"}:
                yield f"{owner}.{node.attr}, line {node.lineno}"


def test_tests_use_no_private_names() -> None:
    """A test's own class may have private attributes; those of the package are not its business."""
    used = [
        f"{path.relative_to(TESTS).as_posix()}: {name}"
        for path in TEST_SOURCES
        for name in private_names(path)
    ]
    assert used == []


def is_private(name: str) -> bool:
    """Names that end in an underscore are called by others: Python, or notebooks."""
    return name.startswith("_") and not name.endswith("_")


# Size


SHAPE = TESTS / "shape.toml"
MAX_METHODS = 30
MANY_METHODS = 25
# Growth of a folder that needs no reason. Splitting a file does no harm, so files have more room.
SLACK = 1.03
FEW_LINES = 60
FILES_SLACK = 1.1
FEW = 3
GROWN = (
    "{what}, more than tests/shape.toml allows. Can something go instead? If not, run "
    "`python tests/test_architecture.py` and say in the same commit why it must grow."
)


def folder_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else "top"


def classes() -> Iterator[tuple[Path, ast.ClassDef]]:
    for path in SOURCES:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                yield path, node


def lines_and_files() -> dict[str, tuple[int, int]]:
    num_lines: Counter[str] = Counter()
    num_files: Counter[str] = Counter()
    for path in SOURCES:
        num_lines[folder_of(path)] += path.read_text().count("\n")
        num_files[folder_of(path)] += 1
    return {folder: (num_lines[folder], num_files[folder]) for folder in sorted(num_lines)}


def uses_of_any() -> dict[str, int]:
    found: Counter[str] = Counter()
    for path in SOURCES:
        found[folder_of(path)] += sum(
            isinstance(node, ast.Name) and node.id == "Any" for node in nodes(path)
        )
    return dict(sorted(found.items()))


def methods() -> dict[str, int]:
    """By class; of those with the same name, the most."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    found: Counter[str] = Counter()
    for _, node in classes():
        num_methods = sum(isinstance(each, kinds) for each in node.body)
        found[node.name] = max(found[node.name], num_methods)
    return dict(found)


def names_twice() -> list[str]:
    counted = Counter(node.name for _, node in classes())
    return sorted(name for name, count in counted.items() if count > 1)


def allowed() -> dict[str, dict[str, list[int] | int | str]]:
    return tomllib.loads(SHAPE.read_text())


def test_folders_grow_only_with_a_reason() -> None:
    table = allowed()["size"]
    for folder, (num_lines, num_files) in lines_and_files().items():
        max_lines, max_files = table.get(folder, (0, 0))
        text = GROWN.format(what=f"penstock/{folder} has {num_lines} lines in {num_files} files")
        assert num_lines <= SLACK * max_lines + FEW_LINES, text
        assert num_files <= FILES_SLACK * max_files + FEW, text


def test_uses_of_any_do_not_spread() -> None:
    table = allowed()["any"]
    for folder, count in uses_of_any().items():
        text = GROWN.format(what=f"penstock/{folder} uses Any {count} times")
        assert count <= table.get(folder, 0) + FEW, text


@pytest.mark.filterwarnings("default:classes with many methods")
def test_classes_have_few_methods() -> None:
    """Those of the table had more than 30 when the rule was made, and may have no more."""
    table, found = allowed()["methods"], methods()
    too_many = {name: count for name, count in found.items() if count > MAX_METHODS}
    grown = {name: count for name, count in too_many.items() if count > table.get(name, 0)}
    assert grown == {}, "split them where a second noun appears"
    if many := {name: count for name, count in found.items() if count > MANY_METHODS}:
        warnings.warn(f"classes with many methods: {many}", stacklevel=1)


def test_a_class_has_its_name_alone() -> None:
    """Those of the table were there twice when the rule was made."""
    assert set(names_twice()) - allowed()["twice"].keys() == set(), "find another name"


def write_shape() -> None:
    rows = ["# What tests/test_architecture.py allows; its last part says how this is written."]
    rows += ["", "[size] # folder = [lines, files]"]
    rows += [f"{name} = [{lines}, {files}]" for name, (lines, files) in lines_and_files().items()]
    rows += ["", "[any] # folder = uses"]
    rows += [f"{name} = {count}" for name, count in uses_of_any().items()]
    rows += ["", f"[methods] # classes with more than {MAX_METHODS}"]
    rows += [f"{name} = {n}" for name, n in sorted(methods().items()) if n > MAX_METHODS]
    rows += ["", "[twice] # names of more than one class"]
    rows += [f"{name} = true" for name in names_twice()]
    SHAPE.write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    write_shape()
