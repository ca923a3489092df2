"""CuPy is imported whole, whichever thread is first."""

import subprocess
import sys

# `cupy.cuda` needs what CuPy sets before it imports it. As compiled modules do, it does not wait.
CUPY = "import time; time.sleep(0.3); version = 13; import cupy.cuda"
CUDA = "import sys, types; runtime = types.SimpleNamespace(**vars(sys.modules['cupy']))"
THREADS = """
import importlib, threading, time
from w2v.kernels.launch import cuda_runtime
other = threading.Thread(target=importlib.import_module, args=["cupy"])
other.start()
time.sleep(0.1)
print(cuda_runtime().version)
"""


def test_a_thread_that_imports_cupy_meanwhile_is_waited_for(tmp_path):
    (tmp_path / "cupy/cuda").mkdir(parents=True)
    (tmp_path / "cupy/__init__.py").write_text(CUPY)
    (tmp_path / "cupy/cuda/__init__.py").write_text(CUDA)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{THREADS}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("13\n", "")
