from __future__ import annotations

import subprocess
import sys


def test_the_gateway_has_no_torch_in_its_process() -> None:
    """torch costs a gateway a gigabyte and seconds of start; transformers would bring it in unseen."""
    heavy = "{'torch', 'transformers', 'triton', 'sentence_transformers'} & set(sys.modules)"
    code = f"import sys, gateway.app, gateway.server; found = {heavy}; sys.exit(str(found) if found else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
