// Names of generics: tests/integration/test_listed_names.py.
package main

import "fmt"

type Pair[K comparable, V any] struct {
	key   K
	value V
}

//go:noinline
func (p *Pair[K, V]) Get() V { return p.value }

//go:noinline
func size[K comparable, V any](m map[K]V) int { return len(m) }

//go:noinline
func same[T any](x T, n int) int { return n }

func main() {
	p := &Pair[string, int]{"a", 1}
	q := &Pair[[3]int, struct{ n int }]{}
	fmt.Println(p.Get(), q.Get().n, same("s", 5), same(1.5, 6), size(map[string]int{"a": 1}), size(map[int][]string{1: nil}))
}
