"""What the tests' fork server imports, in an environment as a worker's: importing this does it.

OpenMP reads how its threads wait when torch is loaded, so the environment comes first. What is
imported is frozen, so that a fork's garbage collector does not copy its pages.
"""

import gc
import importlib
import os

from engine.threads import thread_environment

MODULES = (
    "tests.integration.stack",
    "tests.chaos.soak_source",
    "prefill.worker",
    "decode.worker",
    "router.server",
    "transformers.models.llama.modeling_llama",
)

os.environ.update(thread_environment(1))
for module in MODULES:
    importlib.import_module(module)
gc.collect()
gc.freeze()
