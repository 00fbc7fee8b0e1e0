"""Whether the Hugging Face hub can be reached, found out once for all runs of a script."""

import os
import socket
import threading
import urllib.request
from collections.abc import Iterable
from urllib.parse import urlsplit

# What fetches from the hub, and retries for a quarter of a minute where there is none.
_PACKAGES = {"huggingface_hub", "diffusers", "transformers", "datasets", "timm"}
_SET_BY_A_PERSON = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_SECONDS = 5.0
OFFLINE = {"HF_HUB_OFFLINE": "1"}


def why_unreachable(packages: Iterable[str]) -> str:
    """Return why the hub cannot be reached; nothing if it can, or if nobody would ask it.

    A person's own choice in the environment, and a proxy, leave the question to the script.

    Args:
        packages: What the script imports.
    """
    if not _PACKAGES & set(packages) or any(name in os.environ for name in _SET_BY_A_PERSON):
        return ""
    address = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    if urllib.request.getproxies() or not address.hostname:
        return ""
    place = address.hostname, address.port or (80 if address.scheme == "http" else 443)
    found = [f"{place[0]}: no answer in {_SECONDS:g} seconds"]

    def connect() -> None:
        try:
            socket.create_connection(place, _SECONDS).close()
            found[0] = ""
        except OSError as error:
            found[0] = f"{place[0]}: {error.strerror or error}"

    # Looking up a name has no limit of time, so that it is done beside this thread.
    asking = threading.Thread(target=connect, daemon=True)
    asking.start()
    asking.join(_SECONDS)
    return found[0]
