# Fitted and checked mappers as an image, for clusters without a shared volume. The build context
# is the folder that holds one folder per mapper:
#   docker build -f deploy/docker/mappers.Dockerfile -t kvxfer-mappers:1 MAPPERS
FROM busybox:1.37.0-musl
COPY --chmod=555 . /mappers
USER 65534:65534
CMD ["cp", "-R", "/mappers/.", "/var/lib/kvxfer/mappers/"]
