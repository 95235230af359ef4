"""The command `verify` and the commands of `killick store`: doctor, erase, prove, prune, repair, seal."""
