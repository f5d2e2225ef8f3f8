"""A FastAPI application with models inside: its own routes, and the v2 and OpenAI APIs below
/models.

pip install fastapi uvicorn
uvicorn app:app --app-dir examples/fastapi_app
curl localhost:8000/models/v2/models/digits/infer -d @examples/digit.json
"""

from pathlib import Path

from fastapi import FastAPI

import penstock

REPOSITORY = Path(__file__).resolve().parents[1] / "repository"

models = penstock.asgi(REPOSITORY)
# Starlette and FastAPI do not pass their lifespan on to mounted applications, so the models start
# and stop with the host's own.
app = FastAPI(lifespan=models.lifespan)
app.mount("/models", models)


@app.get("/")
def index() -> dict[str, str]:
    return {"models": "/models/v2/models/{name}", "ready": "/models/v2/health/ready"}
