"""How peers agree on a step, without a socket, a thread, a clock or a tensor: events in, actions out.

Everything here is told what time it is and who sent what; it answers with what is to be done. The driver does it with
real sockets and tensors, the simulator and the tests on virtual time.
"""
