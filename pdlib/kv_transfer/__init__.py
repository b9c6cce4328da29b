"""Kernel 3: KV transfer. Hands a filled cache from P to D, by one of four roads, each on one screen.

device (one process), memory (two processes, one host), network (two hosts), file (later). A manifest goes first.
"""

from pdlib.kv_transfer.device import pinned, transfer
from pdlib.kv_transfer.file import load, load_manifest, save
from pdlib.kv_transfer.manifest import Fingerprint, Manifest, TransferError, cuts_of, fingerprint, manifest_of
from pdlib.kv_transfer.memory import Segment, Sharing, segment_bytes, share, sweep, view
from pdlib.kv_transfer.network import Outgoing, accept, await_offer, offer, receive, refuse

__all__ = [
    "Fingerprint",
    "Manifest",
    "Outgoing",
    "Segment",
    "Sharing",
    "TransferError",
    "accept",
    "await_offer",
    "cuts_of",
    "fingerprint",
    "load",
    "load_manifest",
    "manifest_of",
    "offer",
    "pinned",
    "receive",
    "refuse",
    "save",
    "segment_bytes",
    "share",
    "sweep",
    "transfer",
    "view",
]
