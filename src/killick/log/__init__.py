"""The log: typed events over a store's bytes. Append, read, fold, snapshot, verify, repair."""

from killick.log.append_groups import Ticket
from killick.log.group_commit import Committer
from killick.log.log import Log, Recorded
from killick.log.repair import repair
from killick.log.verify import Report, verify
from killick.log.writer import Entry, RunLog

__all__ = ["Committer", "Entry", "Log", "Recorded", "Report", "RunLog", "Ticket", "repair", "verify"]
