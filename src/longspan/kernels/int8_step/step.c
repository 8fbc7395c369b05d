/* One token through all layers of four-term attention, with int8 weights and an int8 rolling cache.

   A matrix has a scale per row, a cached key or value one per slot. A product equals that of the restored float32 matrix
   up to rounding, and a quarter of the bytes are read. An int8 weight is widened to float32 in a register; on ARM with
   dot-product instructions, activations are rounded to 22 bits instead and products are sums of integers. Every sum has a
   fixed order, whatever the number of threads is.

   Columns of matrices are padded with zeros to a multiple of 64, those of heads to one of 16. */

#include <math.h>
#include <stdint.h>
#include <string.h>

/* WIDTH floats, and WIDTH bytes as floats. GCC 12 and Clang convert generic vectors of bytes one by one. */
#if defined(__AVX512F__)
#include <immintrin.h>
typedef __m512 Floats;
enum { WIDTH = 16 };
static inline Floats widen(const int8_t *x) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)x)));
}
static inline float total_of(Floats x) { return _mm512_reduce_add_ps(x); }
#elif defined(__AVX2__)
#include <immintrin.h>
typedef __m256 Floats;
enum { WIDTH = 8 };
static inline Floats widen(const int8_t *x) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)x)));
}
static inline float total_of(Floats x) {
    __m128 half = _mm256_castps256_ps128(x) + _mm256_extractf128_ps(x, 1);
    half += _mm_movehl_ps(half, half);
    return half[0] + half[1];
}
#elif defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
typedef float32x4_t Floats;
enum { WIDTH = 4 };
static inline Floats widen(const int8_t *x) {
    /* Each byte at the top of 32 bits, which are converted as a number with 24 fractional bits. */
    static const uint8_t top[16] = {255, 255, 255, 0, 255, 255, 255, 1, 255, 255, 255, 2, 255, 255, 255, 3};
    int32_t bytes;
    memcpy(&bytes, x, 4);
    int8x16_t spread = vqtbl1q_s8(vreinterpretq_s8_s32(vsetq_lane_s32(bytes, vdupq_n_s32(0), 0)), vld1q_u8(top));
    return vcvtq_n_f32_s32(vreinterpretq_s32_s8(spread), 24);
}
static inline float total_of(Floats x) { return vaddvq_f32(x); }
#else
typedef float Floats;
enum { WIDTH = 1 };
static inline Floats widen(const int8_t *x) { return *x; }
static inline float total_of(Floats x) { return x; }
#endif

typedef struct {
    const int8_t *weight; /* [rows, columns] */
    const float *scale;   /* [rows] */
    const float *bias;    /* [rows] or NULL */
    int64_t rows, columns;
} Matrix;

typedef struct {
    const float *gain, *shift; /* no gain: no norm; no shift: RMS norm */
    double eps;
} Norm;

typedef struct {
    Matrix qkv, output, up, down;
    Norm attention_norm, feed_forward_norm, query_norm, key_norm;
    const int8_t *distance;      /* [H, C, P], distance 0 first; P is D padded */
    const float *distance_scale; /* [H, C] */
    const float *u, *w;          /* [H, D] */
    int8_t *keys, *values;       /* [H, S, P] */
    float *key_scale, *value_scale; /* [H, S] */
    const float *taps;              /* [N, E], the previous position first, or NULL */
    float *inputs;                  /* [N, E], the previous position last */
} Layer;

typedef struct {
    const Layer *layers;
    Matrix embedding, head;
    Norm final_norm;
    int64_t count, width, heads, head_width, slots, distances, pre_norm, activation, taps;
    double embedding_scale, temperature;
    const float *discounts;                      /* [S], by distance: what scores lose */
    float *x, *y, *sum, *qkv, *attended, *inner; /* padded with zeros */
    float *scores;                               /* [H, S] */
} Model;

/* e^x for x <= 0, in a form that vectorises: 2^n times a polynomial, wrong by less than 2e-7. */
static inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    float n = floorf(x * 1.44269504f + 0.5f);
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t bits = ((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return p * power;
}

static inline Floats load(const float *x) {
    Floats found;
    memcpy(&found, x, sizeof found);
    return found;
}

/* The right side of products: activations as they are, or rounded to 22 bits in three bytes. */
#if defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
typedef struct {
    const int8_t *high, *middle, *low; /* 128 * (128 * high + middle) + low */
    float scale;
} Input;

static Input input(const float *x, int64_t columns, int8_t *space) {
    float largest = 0, sum = 0;
#pragma omp simd reduction(max : largest) reduction(+ : sum)
    for (int64_t k = 0; k < columns; k++) {
        largest = fabsf(x[k]) > largest ? fabsf(x[k]) : largest;
        sum += x[k];
    }
    float inverse = largest > 0 ? 127 * 16384 / largest : 1;
    int8_t *high = space, *middle = space + columns, *low = space + 2 * columns;
#pragma omp simd
    for (int64_t k = 0; k < columns; k++) {
        int32_t whole = (int32_t)rintf(x[k] * inverse), upper = (whole + 64) >> 7, top = (upper + 64) >> 7;
        high[k] = (int8_t)top;
        middle[k] = (int8_t)(upper - 128 * top);
        low[k] = (int8_t)(whole - 128 * upper);
    }
    return (Input){high, middle, low, 1 / inverse + 0 * sum}; /* NaN stays NaN */
}

/* Without scales; int32 suffices for 130,000 columns. */
static inline float product(const int8_t *row, Input x, int64_t columns) {
    int32x4_t high = vdupq_n_s32(0), middle = high, low = high;
    for (int64_t k = 0; k < columns; k += 16) {
        int8x16_t weights = vld1q_s8(row + k);
        high = vdotq_s32(high, weights, vld1q_s8(x.high + k));
        middle = vdotq_s32(middle, weights, vld1q_s8(x.middle + k));
        low = vdotq_s32(low, weights, vld1q_s8(x.low + k));
    }
    return x.scale * (16384 * (float)vaddvq_s32(high) + (128 * (float)vaddvq_s32(middle) + (float)vaddvq_s32(low)));
}
#else
typedef const float *Input;

static Input input(const float *x, int64_t columns, int8_t *space) {
    (void)columns, (void)space;
    return x;
}

static inline float product(const int8_t *row, Input x, int64_t columns) {
    Floats a = {0}, b = a, c = a, d = a;
    int64_t k = 0;
    for (; k + 4 * WIDTH <= columns; k += 4 * WIDTH) {
        a += widen(row + k) * load(x + k);
        b += widen(row + k + WIDTH) * load(x + k + WIDTH);
        c += widen(row + k + 2 * WIDTH) * load(x + k + 2 * WIDTH);
        d += widen(row + k + 3 * WIDTH) * load(x + k + 3 * WIDTH);
    }
    for (; k < columns; k += WIDTH) a += widen(row + k) * load(x + k);
    return total_of((a + b) + (c + d));
}
#endif

static void multiply(const Matrix *m, const float *x, float *out) {
    int8_t space[3 * m->columns];
    Input right = input(x, m->columns, space);
#pragma omp parallel for schedule(static) if (m->rows * m->columns > 524288)
    for (int64_t r = 0; r < m->rows; r++)
        out[r] = product(m->weight + r * m->columns, right, m->columns) * m->scale[r] + (m->bias ? m->bias[r] : 0);
}

static void normalise(const Norm *norm, const float *x, float *out, int64_t width) {
    if (!norm->gain) {
        if (out != x) memcpy(out, x, width * sizeof *x);
        return;
    }
    float mean = 0, square = 0;
    if (norm->shift) {
#pragma omp simd reduction(+ : mean)
        for (int64_t k = 0; k < width; k++) mean += x[k];
        mean /= width;
    }
#pragma omp simd reduction(+ : square)
    for (int64_t k = 0; k < width; k++) square += (x[k] - mean) * (x[k] - mean);
    float scale = 1 / sqrtf(square / width + (float)norm->eps);
    for (int64_t k = 0; k < width; k++)
        out[k] = (x[k] - mean) * scale * norm->gain[k] + (norm->shift ? norm->shift[k] : 0);
}

static float quantise(const float *x, int8_t *out, int64_t width) {
    float largest = 0;
    for (int64_t k = 0; k < width; k++) largest = fmaxf(largest, fabsf(x[k]));
    float scale = largest > 0 ? largest / 127 : 1;
    for (int64_t k = 0; k < width; k++) out[k] = (int8_t)fmaxf(-127, fminf(127, rintf(x[k] / scale)));
    return scale;
}

/* The sum of the values, weighted by scores, 16 columns at a time. */
static void weigh(const int8_t *values, const float *weights, int64_t filled, int64_t columns, float *out) {
    enum { PARTS = 16 / WIDTH };
    for (int64_t d = 0; d < columns; d += 16) {
        Floats a[PARTS] = {{0}}, b[PARTS] = {{0}};
        int64_t s = 0;
        for (; s + 1 < filled; s += 2) {
            const int8_t *row = values + s * columns + d, *next = row + columns;
            for (int n = 0; n < PARTS; n++) a[n] += widen(row + n * WIDTH) * weights[s];
            for (int n = 0; n < PARTS; n++) b[n] += widen(next + n * WIDTH) * weights[s + 1];
        }
        for (int n = 0; n < PARTS; n++) {
            if (s < filled) a[n] += widen(values + s * columns + d + n * WIDTH) * weights[s];
            a[n] += b[n];
        }
        memcpy(out + d, a, sizeof a);
    }
}

static void attend_head(const Model *m, const Layer *layer, int64_t h, int64_t slot, int64_t filled) {
    const int64_t D = m->head_width, P = (D + 15) / 16 * 16, S = m->slots, C = m->distances, I = m->heads * D;
    const float factor = 1 / sqrtf((float)D);
    float *query = m->qkv + h * D;
    normalise(&layer->query_norm, query, query, D);
    normalise(&layer->key_norm, query + I, query + I, D);
    float qu[P], qw[P], out[P], *scores = m->scores + h * S, top = -INFINITY, total = 0;
    int8_t *keys = layer->keys + h * S * P, *values = layer->values + h * S * P;
    float *key_scale = layer->key_scale + h * S, *value_scale = layer->value_scale + h * S;
    key_scale[slot] = quantise(query + I, keys + slot * P, D);
    value_scale[slot] = quantise(query + 2 * I, values + slot * P, D);
    for (int64_t d = 0; d < P; d++) {
        qu[d] = d < D ? (query[d] + layer->u[h * D + d]) * factor : 0;
        qw[d] = d < D ? (query[d] + layer->w[h * D + d]) * factor : 0;
    }
    int8_t space[6 * P];
    Input by_key = input(qu, P, space), by_distance = input(qw, P, space + 3 * P);
    for (int64_t s = 0; s < filled; s++) {
        int64_t away = slot - s + (s > slot ? S : 0), c = h * C + (away < C ? away : C - 1);
        scores[s] = product(keys + s * P, by_key, P) * key_scale[s]
            + product(layer->distance + c * P, by_distance, P) * layer->distance_scale[c] - m->discounts[away];
        top = fmaxf(top, scores[s]);
    }
#pragma omp simd reduction(+ : total)
    for (int64_t s = 0; s < filled; s++) total += scores[s] = exponential(scores[s] - top);
    for (int64_t s = 0; s < filled; s++) scores[s] *= value_scale[s] / total;
    weigh(values, scores, filled, P, out);
    memcpy(m->attended + h * D, out, D * sizeof *out);
}

static void activate(float *x, int64_t width, int64_t kind) {
    for (int64_t k = 0; k < width; k++) {
        float kept = x[k] > 0 ? x[k] : 0;
        x[k] = kind == 1 ? kept : kind == 2 ? kept * kept : kind == 3 ? 0.5f * x[k] * (1 + erff(x[k] * 0.70710678f)) : x[k];
    }
}

/* x + sum_j taps[j] * (x of j positions before), which is then stored. */
static void convolve(const Layer *layer, float *x, int64_t width, int64_t taps) {
    float *inputs = layer->inputs;
    for (int64_t k = 0; k < width; k++) {
        float here = x[k];
        for (int64_t j = 0; j < taps; j++) x[k] += layer->taps[j * width + k] * inputs[(taps - 1 - j) * width + k];
        for (int64_t j = 1; j < taps; j++) inputs[(j - 1) * width + k] = inputs[j * width + k];
        inputs[(taps - 1) * width + k] = here;
    }
}

/* Logits of the token after `token`, which is number `written` of its stream. */
void longspan_step(const Model *m, int64_t token, int64_t written, float *logits) {
    const int64_t E = m->width, slot = written % m->slots;
    const int64_t filled = written + 1 < m->slots ? written + 1 : m->slots;
    for (int64_t k = 0; k < E; k++)
        m->x[k] = m->embedding.weight[token * m->embedding.columns + k] * m->embedding.scale[token] * (float)m->embedding_scale;
    for (int64_t n = 0; n < m->count; n++) {
        const Layer *layer = m->layers + n;
        const Norm none = {0};
        if (m->taps) convolve(layer, m->x, E, m->taps);
        normalise(m->pre_norm ? &layer->attention_norm : &none, m->x, m->y, E);
        multiply(&layer->qkv, m->y, m->qkv);
#pragma omp parallel for schedule(static) if (filled * m->heads * m->head_width > 524288)
        for (int64_t h = 0; h < m->heads; h++) attend_head(m, layer, h, slot, filled);
        multiply(&layer->output, m->attended, m->sum);
        for (int64_t k = 0; k < E; k++) m->sum[k] += m->x[k];
        if (!m->pre_norm) normalise(&layer->attention_norm, m->sum, m->sum, E);
        normalise(m->pre_norm ? &layer->feed_forward_norm : &none, m->sum, m->y, E);
        multiply(&layer->up, m->y, m->inner);
        activate(m->inner, layer->up.rows, m->activation);
        multiply(&layer->down, m->inner, m->x);
        for (int64_t k = 0; k < E; k++) m->x[k] += m->sum[k];
        if (!m->pre_norm) normalise(&layer->feed_forward_norm, m->x, m->x, E);
    }
    normalise(&m->final_norm, m->x, m->y, E);
    multiply(&m->head, m->y, logits);
    for (int64_t v = 0; v < m->head.rows; v++) logits[v] /= (float)m->temperature;
}
