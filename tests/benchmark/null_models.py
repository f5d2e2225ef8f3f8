"""A folder with a `null` model: INT32 [1] to [1], as fast or slow as asked."""

from pathlib import Path


def make(root: Path, name: str = "model", *, max_batch: int = 8, **options: object) -> Path:
    folder = root / name
    (folder / "1").mkdir(parents=True)
    lines = [
        f'backend: "null" max_batch_size: {max_batch}',
        'input { name: "x" data_type: TYPE_INT32 dims: 1 }',
        'output { name: "y" data_type: TYPE_INT32 dims: 1 }',
    ]
    for key, value in options.items():
        lines.append(f'parameters {{ key: "null.{key}" value {{ string_value: "{value}" }} }}')
    (folder / "config.pbtxt").write_text("\n".join(lines))
    return folder
