"""The zygote of scripted models: ``python -m tests.serve.scripted_zygote``."""

import os
import sys
import threading

from tests.serve.scripted import libraries
from umad.serve import zygote
from umad.serve.loaded import Load
from umad.settings import Settings


def bring() -> Load:
    if "UMAD_TEST_THREAD" in os.environ:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    return libraries(Settings())


if __name__ == "__main__":
    sys.exit(zygote.main(bring=bring))
