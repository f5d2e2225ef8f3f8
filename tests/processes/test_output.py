"""What a child writes can be read while it writes."""

import subprocess
import sys

from penstock.processes.output import TAIL_BYTES, TAIL_LINES, Output


def written(output: Output, text: str) -> None:
    command = [sys.executable, "-c", "import sys; sys.stdout.write(sys.argv[1])", text]
    subprocess.run(command, stdout=output.fileno(), check=True)


def test_reading_does_not_disturb_the_writer():
    output = Output()
    written(output, "one ")
    assert output.text() == "one "
    written(output, "two")
    assert output.text() == "one two"
    assert output.tail("it") == "; it wrote: one two"
    output.close()


def test_the_tail_is_the_end_and_short():
    output = Output()
    written(output, "a" * 3 * TAIL_BYTES + "end")
    assert len(output.tail("it")) < TAIL_BYTES + 50
    assert output.tail("it").endswith("end")
    output.close()


def test_the_tail_is_of_whole_lines_and_few():
    output = Output()
    lines = [f"warning {number}" for number in range(TAIL_BYTES)]
    written(output, "\n".join(lines))
    assert output.tail("it") == "; it wrote: " + "\n".join(lines[-TAIL_LINES:])
    output.close()
    output = Output()
    written(output, f"{'a' * 100}\n{'b' * (TAIL_BYTES - 10)}\nend")
    assert output.tail("it") == f"; it wrote: {'b' * (TAIL_BYTES - 10)}\nend"
    output.close()


def test_who_wrote_nothing_is_not_mentioned():
    output = Output()
    written(output, " \n")
    assert output.tail("it") == ""
    output.close()
