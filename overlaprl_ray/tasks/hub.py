"""The Hugging Face hub: asked once whether it is there, since its own client tries every file for half a minute.

holds("Qwen/Qwen2.5-0.5B", "config.json")
"""

import os


def holds(repository: str, file: str, kind: str = "model") -> bool:
    """Whether a repository has a file: the hub knows, or the local cache where the hub does not answer.

    In that case this process and those it starts keep to the cache from then on: what is cached loads.
    """
    from huggingface_hub import constants, errors, file_exists, try_to_load_from_cache  # half a second

    if not constants.HF_HUB_OFFLINE:
        try:
            return file_exists(repository, file, repo_type=kind)
        except (errors.HfHubHTTPError, errors.HFValidationError):  # an answer of the hub; no name of a repository
            raise
        except Exception:  # no name, no route, no answer in time: the client's HTTP library changes
            os.environ["HF_HUB_OFFLINE"] = "1"  # for what is imported later, and for actors
            constants.HF_HUB_OFFLINE = True
    return isinstance(try_to_load_from_cache(repository, file, repo_type=kind), str)
