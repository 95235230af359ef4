"""The vault: snapshot content in packs, stored once under its hash."""
