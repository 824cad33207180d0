/* A Python whose interpreter is the shared library, whatever the machine's own python3 is made of. */

int Py_BytesMain(int argc, char **argv);

int main(int argc, char **argv)
{
	return Py_BytesMain(argc, argv);
}
