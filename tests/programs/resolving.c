/* A patch for the C library: all names are looked up as 127.0.0.9. */
struct addrinfo;

extern int orig_getaddrinfo(const char *, const char *, const struct addrinfo *, struct addrinfo **);

int getaddrinfo(const char *node, const char *service, const struct addrinfo *hints, struct addrinfo **result)
{
	(void)node;
	return orig_getaddrinfo("127.0.0.9", service, hints, result);
}
