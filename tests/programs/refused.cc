/* A patch for replaced.c that is refused, because it handles exceptions. */
extern "C" long orig_work(long x);

extern "C" long work(long x)
{
	try {
		return orig_work(x);
	} catch (...) {
		return 0;
	}
}
