"""Call stacks of user programs, by the unwind tables that lie in their memory (``.eh_frame``)."""
