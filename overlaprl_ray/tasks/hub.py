"""The Hugging Face hub: found out of reach in seconds, where its own client would try again for most of a minute.

prefer_cache_when_unreachable()    # before anything is asked of the hub by name
"""

import os
import queue
import threading

LIMIT_S = 5.0  # longest wait for the hub to answer at all


def prefer_cache_when_unreachable() -> None:
    """Switch this process and its children to the local cache if the hub does not answer: what is cached loads."""
    from huggingface_hub import constants, get_session  # half a second, and needed for hub names only

    if constants.HF_HUB_OFFLINE:
        return
    replies: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def ask() -> None:
        try:
            get_session().head(constants.ENDPOINT, timeout=LIMIT_S)
        except Exception:  # no name, no route, a proxy's refusal: the HTTP client has a type for each
            replies.put(False)
        else:
            replies.put(True)

    threading.Thread(target=ask, daemon=True).start()  # looking up a name can hang beyond the client's own limit
    try:
        reachable = replies.get(timeout=LIMIT_S)
    except queue.Empty:
        reachable = False
    if not reachable:
        os.environ["HF_HUB_OFFLINE"] = "1"  # for what is imported later, and for actors
        constants.HF_HUB_OFFLINE = True


def holds(repository: str, file: str) -> bool:
    """Whether a model's repository has a file: in the cache, or on the hub where that may be asked."""
    from huggingface_hub import constants, file_exists, try_to_load_from_cache

    cached = isinstance(try_to_load_from_cache(repository, file), str)
    return cached or (not constants.HF_HUB_OFFLINE and file_exists(repository, file))
