// What Python hands over: mirrored field by field in engine/native_library.py.
#pragma once

#include <cstdint>

#include "gemm.h"

namespace sluice {

struct Group {
    const int64_t* slots;   // [tokens]: block * block_size + offset of each token
    const int32_t* blocks;  // [sequences][table_width]; holes are never looked at
    int64_t table_width;
};

enum KVType : int64_t { AS_COMPUTED = 0, FLOAT8_E4M3 = 1 };

struct Step {
    int64_t tokens, sequences;
    const int32_t* query_starts;  // [sequences + 1]
    const int32_t* kv_lens;       // [sequences]
    const Group* groups;
    char* pool;
    int64_t block_nbytes, block_size;
    const float* cos;  // [tokens][rotary_dim]
    const float* sin;
    int64_t kv_type;  // of the pool
};

// Where one KV head of a layer is, and what its queries see.
struct KVHead {
    int64_t group;
    int64_t key_offset, value_offset;  // of its first token in a block, bytes
    int64_t window;                    // tokens, 0: all
    int64_t first_tokens;              // seen beside the window
};

struct Attention {
    const KVHead* places;  // [kv_heads]
    int64_t token_nbytes;  // from one token of a block to the next
    int64_t heads, kv_heads, head_dim;
    const float* sinks;  // [heads] or null
    float scaling, softcap;  // softcap 0: none
};

struct Norm {
    const float* weight;  // null: no norm here
    float epsilon;
};

enum Activation : int64_t { SILU = 0, GELU_TANH = 1 };

struct Layer {
    Attention attention;
    Norm before_attention, after_attention, before_mlp, after_mlp;
    Norm query, key;     // per head
    int64_t rotary_dim;  // 0: no rotary embedding
    Matrix qkv, output, gate_up, down;
    int64_t activation;
};

}  // namespace sluice
