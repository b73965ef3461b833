"""A Hugging Face repository → its snapshot in the hub's own cache: safetensors, configuration and tokenizer only."""

import re
from pathlib import Path

import httpx
import huggingface_hub
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from nori_cluster import env
from nori_cluster.checkpoint.progress import Progress
from nori_cluster.errors import ModelUnavailable

REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model"]
IGNORED = ["consolidated*", "original/*", "*/*.safetensors", "onnx/*"]
ELSE = "or give a local folder or a .gguf file"


def is_repo_id(source: str) -> bool:
    return REPO_ID.fullmatch(source) is not None and len(source) <= 96


def snapshot(repo_id: str, progress: Progress) -> Path:
    """Download what is new; with HF_HUB_OFFLINE set only the cache is read. Raises ModelUnavailable."""
    offline = env.hf_offline()
    try:
        with progress.task(f"downloading {repo_id}", None):
            folder = huggingface_hub.snapshot_download(
                repo_id, allow_patterns=PATTERNS, ignore_patterns=IGNORED, local_files_only=offline
            )
    except GatedRepoError as error:
        raise ModelUnavailable(f"{repo_id} is gated: accept its terms on its page and set HF_TOKEN, {ELSE}") from error
    except RepositoryNotFoundError as error:
        raise ModelUnavailable(
            f"{repo_id} is not on the hub (or private: set HF_TOKEN); check the name, {ELSE}"
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        if offline:
            reason = "is not in the local cache and HF_HUB_OFFLINE is set: unset it to download"
        else:
            reason = "is not in the local cache and the hub cannot be reached: check network, proxy and HF_ENDPOINT"
        raise ModelUnavailable(f"{repo_id} {reason}, {ELSE}") from error
    except (HfHubHTTPError, EntryNotFoundError, httpx.HTTPError, OSError) as error:
        raise ModelUnavailable(
            f"{repo_id} could not be downloaded: {error!s:.300}. Check network, proxy and HF_ENDPOINT; if it was "
            f"downloaded before, set HF_HUB_OFFLINE=1, {ELSE}"
        ) from error
    return Path(folder)
