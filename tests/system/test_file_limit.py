import subprocess
import sys

PROGRAM = """
import resource
from penstock.system.file_limit import raise_file_limit

_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))
raise_file_limit()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most)
"""


def test_the_soft_limit_becomes_the_hard_one():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
