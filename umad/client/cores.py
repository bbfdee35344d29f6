"""How many threads torch computes with in a thread of ours; torch itself is not imported here."""

import sys
import threading
from typing import Final

_capping: Final = threading.Lock()


def cap_threads(most: int) -> None:
    """Have torch use at most so many threads for what the calling thread computes.

    Each thread that computes gets an OpenMP team of its own, which lives as long as it does: ten
    of them with eight each were 80 threads that wait for two cores.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return
    with _capping:  # the first look of a thread takes over what is set for all
        before = torch.get_num_threads()
        if before > most:
            torch.set_num_threads(most)
            # That is set for all threads that are yet to begin, too, and not meant for them.
            other = threading.Thread(target=torch.set_num_threads, args=(before,))
            other.start()
            other.join()
