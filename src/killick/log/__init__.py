"""The log: typed events over a store's bytes. Append, read, fold, snapshot, verify, repair."""

from killick.log.committer import Committer, Ticket
from killick.log.handle import Entry, RunLog
from killick.log.log import Log, Recorded
from killick.log.repair import repair
from killick.log.verify import Report, verify

__all__ = ["Committer", "Entry", "Log", "Recorded", "Report", "RunLog", "Ticket", "repair", "verify"]
