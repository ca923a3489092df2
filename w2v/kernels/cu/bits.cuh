// The bits of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), as in w2v/kernels/random.py.
__device__ unsigned long long splitmix64(unsigned long long counter, unsigned long long mixed_seed) {
    unsigned long long bits = counter * 0x9E3779B97F4A7C15ull + mixed_seed;
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9ull;
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBull;
    return bits ^ (bits >> 31);
}
