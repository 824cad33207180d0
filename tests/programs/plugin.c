/* A library with a constructor, and a function that counts; plugin_value is for 'push <symbol>'. */
int plugin_value = 4711;
static volatile int calls;

__attribute__((constructor)) static void plugin_begin(void)
{
	calls = 100;
}

int plugin_call(int n)
{
	calls += n;
	return calls;
}
