use std::collections::HashMap; use std::fmt::Debug;
trait Shape { fn area(&self) -> f64; }
struct Sq<T>(T);
impl Shape for Sq<f64> { fn area(&self) -> f64 { self.0*self.0 } }
impl<T: Debug, const N: usize> Shape for Sq<[T; N]> { #[inline(never)] fn area(&self) -> f64 { println!("{:?}", self.0); N as f64 } }
mod inner { pub mod deep { #[inline(never)] pub fn apply<F: Fn(u32) -> u32>(f: F, n: u32) -> u32 { f(n) + std::hint::black_box(1) } } }
#[inline(never)] fn take(x: &dyn Shape, m: &mut HashMap<String, (i32, *const u8, Option<&'static str>)>, f: fn(u8, &mut [char]) -> !) -> f64 { std::hint::black_box(f); m.insert("a".into(), (1, std::ptr::null(), None)); x.area() }
fn never(_: u8, _: &mut [char]) -> ! { loop {} }
fn main(){ let mut m = HashMap::new(); println!("{} {}", take(&Sq([1,2,3]), &mut m, never), take(&Sq(2.0), &mut m, never)); println!("{}", inner::deep::apply(|x| x*2, std::env::args().count() as u32)); }
