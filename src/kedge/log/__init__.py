"""The log: typed events over a store's bytes. Append, read, fold, snapshot, verify, repair."""

from kedge.log.committer import Committer, Ticket
from kedge.log.handle import Entry, RunLog
from kedge.log.log import Log, Recorded
from kedge.log.repair import repair
from kedge.log.verify import Report, verify

__all__ = ["Committer", "Entry", "Log", "Recorded", "Report", "RunLog", "Ticket", "repair", "verify"]
