"""One worker's side of the protocol, without sockets, clocks or threads."""
