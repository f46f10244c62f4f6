# syntax=docker/dockerfile:1
# Sluice for CPUs and, by --build-arg TORCH_INDEX=..., for GPUs:
#
#   docker build -t sluice:0.1.0 .
#
# The version of Python decides about Ray: head, workers and drivers must have the same one.
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d

FROM ${PYTHON_IMAGE} AS build
# The base image's tag decides the release of Debian, which keeps versions.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /app
RUN python -m venv /opt/sluice
ENV PATH=/opt/sluice/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
COPY requirements/cpu.lock requirements/torch.txt requirements/
# Hash-checked. Torch comes from wherever its build for this hardware is: empty, pip's own index.
RUN pip install --require-hashes --no-deps --requirement requirements/cpu.lock
ARG TORCH_INDEX=
RUN pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} --requirement requirements/torch.txt
COPY pyproject.toml README.md LICENSE ./
COPY core core
COPY blockmgr blockmgr
COPY transfer transfer
COPY engine engine
COPY ranks ranks
COPY prefill prefill
COPY decode decode
COPY router router
COPY deploy deploy
COPY bench bench
RUN pip install --no-deps --no-build-isolation --editable . \
    && python -m compileall -q /app

FROM ${PYTHON_IMAGE}
# g++ compiles the attention kernels for the CPU that it finds; bash is KubeRay's.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends bash g++ libgomp1 libnuma1 \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 1000 sluice \
    && useradd --uid 1000 --gid 1000 --create-home sluice \
    && install --directory --owner sluice --group sluice /models
COPY --from=build /opt/sluice /opt/sluice
COPY --from=build /app /app
ENV PATH=/opt/sluice/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    OMP_WAIT_POLICY=PASSIVE \
    SLUICE_CACHE=/models/sluice \
    HF_HOME=/models/huggingface
WORKDIR /app
USER 1000:1000
EXPOSE 8000
CMD ["sluice", "serve", "--host", "0.0.0.0"]
