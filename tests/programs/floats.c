/* A function with a floating-point argument. */
#include <stdio.h>

__attribute__((noipa)) double halve(double value)
{
	return value / 2;
}

int main(void)
{
	printf("%.2f\n", halve(2.5));
	return 0;
}
