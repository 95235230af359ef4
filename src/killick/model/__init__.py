"""The pure model: events, values, the chain and the folds. No I/O, no clock, no chance."""
