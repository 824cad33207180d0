"""Call stacks of user programs, by the unwind tables in their memory (``.eh_frame``) or in their files."""
