"""The lab takes no torch until something runs, which takes seconds to import."""

from __future__ import annotations

import subprocess
import sys


def test_the_lab_is_imported_without_torch() -> None:
    code = (
        "import importlib, pkgutil, sys, paged_backend.lab as lab\n"
        "for module in pkgutil.iter_modules(lab.__path__): importlib.import_module(f'{lab.__name__}.{module.name}')\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
