"""Messages of the wire, generated from `hicache.proto` by `make proto`, which is where every field is explained."""
